"""Suspicion: a request that kills its rank must not kill the next one, and the next, for ever. Pure.

Suspects compute alone, one after the other in order, while all others wait; see repute.py.
"""

from collections.abc import Iterable, Sequence

from kvloom.engine.schedule.repute import Repute
from kvloom.engine.schedule.seq import Seq, Status


def accuse(seqs: Iterable[Seq]) -> list[Seq]:
    """A rank died while it computed `seqs`: they become suspects. Returns those that were before: the guilty."""
    guilty = []
    for seq in seqs:
        seq.repute = seq.repute or Repute()
        if seq.repute.accuse(len(seq.token_ids)):
            guilty.append(seq)
    return guilty


def next_alone(seqs: Sequence[Seq]) -> Seq | None:
    """The suspect that computes alone now: one that has begun, else the first that waits."""
    suspects = [seq for seq in seqs if seq.is_suspect and seq.status is not Status.LOADING]
    return min(suspects, key=lambda seq: (seq.status is not Status.RUNNING, seq.turn, seq.id), default=None)
