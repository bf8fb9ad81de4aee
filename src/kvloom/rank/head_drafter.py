"""HeadDrafter: a guess head (checkpoints/guess_head.py) as a draft model.

It reads prompts when the model has computed them. Where the state before a token is not known, because the model began
behind a prefix that others had computed, the token is read with zeros, as the first of every text is (llama.cpp does
the same). That costs a part of a guess, and never changes an answer.
"""

from collections.abc import Sequence

import numpy as np

from kvloom.contract.messages import Work
from kvloom.rank.drafter import LEAST_ROOM, Read, TextOf
from kvloom.rank.kernels.backend import Backend, Floats, Ragged
from kvloom.rank.state_drafter import StateDrafter

READ_TOKENS = 16  # of an answer that are read together, unless it drafts
KEPT_STATES = 48  # of a sequence: those tokens, and as many as it may go back behind a wrong guess


class HeadDrafter(StateDrafter):
    """See Drafter. What it reads of a text behind the known tokens, where it has states of its own alone, it reads
    again when it has the model's.
    """

    def __init__(self, backend: Backend, max_seq_len: int, vocab_size: int) -> None:
        super().__init__(backend, max_seq_len, vocab_size, backend.whole_spec.hidden)

    def num_states(self, work: Work) -> int:
        """See Drafter."""
        return work.num_tokens

    def settle(self, works: Sequence[Work], states: Floats, text_of: TextOf) -> None:
        """See Drafter. Reads what the step has computed, if that is a prompt or enough of an answer."""
        reading = []
        for work, seq, num_computed in self._told(works, states, text_of):
            if work.id in self._asked:
                seq.num_known = min(seq.num_known, work.start + work.num_tokens - len(work.draft))
            seq.num_known = min(seq.num_known, num_computed)
            if self._states_of(seq).first - seq.num_known <= LEAST_ROOM:
                seq.text = list(text_of(work.id))
                reading.append((seq, num_computed - seq.num_known))
        self._asked = []
        if any(count >= READ_TOKENS for _, count in reading):
            self._catch_up([(seq, count) for seq, count in reading if count])
        for work in works:
            self._mark(self._seqs[work.id])
            kept = self._states_of(self._seqs[work.id])
            kept.forget_before(kept.end - KEPT_STATES)

    def _catch_up(self, reading: Sequence[tuple[Read, int]]) -> None:
        """Compute keys and values alone."""
        none = np.empty(0, np.int32)
        self._backend.step(self._inputs(reading), none, [], None, None)
        for seq, count in reading:
            seq.num_known += count

    def _inputs(self, reading: Sequence[tuple[Read, int]]) -> Ragged:
        before = [self._states_of(seq).before(seq.num_known, seq.num_known + count) for seq, count in reading]
        return super()._inputs(reading)._replace(states=np.concatenate(before))

    def _keep_states(self, seqs: Sequence[Read]) -> None:
        assert self._head is not None, "there was a pass"
        for seq, state in zip(seqs, self._head.states, strict=True):
            if seq.num_known == len(seq.text):  # and a guess follows
                self._states_of(seq).put(seq.num_known - 1, state[None])
