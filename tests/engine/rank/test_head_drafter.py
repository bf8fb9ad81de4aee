"""HeadDrafter: with which states it reads which tokens, when, and what it reads again; over a backend that notes it."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.messages import BY_MODEL, Batch, StepOutput, Work
from kvloom.rank.drafter import LEAST_ROOM
from kvloom.rank.head_drafter import READ_TOKENS, HeadDrafter
from kvloom.rank.kernels.backend import Floats, Head, Ragged
from kvloom.rank.state_drafter import States

from .test_drafter import NUM_BLOCKS, SIZE, VOCAB, Counting

HIDDEN = 2
OWN = 1000.0  # the head's states are above it, the model's below


class Noting(Counting):
    """Notes (position, id, first number of its state) of each token, and passes that asked for no guess as well."""

    whole_spec = SimpleNamespace(vocab_size=VOCAB, hidden=HIDDEN)

    def __init__(self) -> None:
        super().__init__(chooses=False)
        self.rows: list[list[tuple[int, int, float]]] = []

    def step(self, batch: Ragged, rows: Any, tops: list[int], states: Any, choices: Any) -> Head:
        assert batch.states is not None
        given = batch.states[:, 0].tolist()
        self.rows.append(list(zip(batch.pos.tolist(), batch.ids.tolist(), given, strict=True)))
        head = super().step(batch, rows, tops, states, choices)
        own = np.array([[OWN + batch.pos[row]] * HIDDEN for row in rows], np.float32)
        return Head(head.tops, head.full, head.values, head.ids, own, head.tokens)


class Desk:
    """One sequence, 0, whose model has the state p + 1 at position p."""

    def __init__(self, text: Sequence[int]) -> None:
        self.backend, self.text = Noting(), list(text)
        self.drafter = HeadDrafter(self.backend, 400, VOCAB)  # type: ignore[arg-type]
        self.blocks = list(range(NUM_BLOCKS))

    def step(self, start: int, count: int, num_drafted: int = 0, fresh: Sequence[int] = ()) -> list[int]:
        """The model computes `count` tokens, then drafts, and `fresh` tokens come of it. Returns the draft."""
        first = start == 0 or not self.drafter._seqs
        draft = [BY_MODEL] * num_drafted
        work = Work(
            0, start, count + num_drafted, 0 if first else len(self.blocks), self.blocks if first else [], draft
        )
        self.drafter.follow(Batch([], [work], []))
        (done,) = self.drafter.draft([work], lambda id: self.text, 0, StepOutput([], [], 0.0))
        self.text += fresh
        self.drafter.settle([done], states_of(start, done.num_tokens), lambda id: self.text)
        return done.draft

    def read(self) -> list[list[tuple[int, int, float]]]:
        """What was read since the last call."""
        found, self.backend.rows = self.backend.rows, []
        return found


def states_of(start: int, count: int) -> Floats:
    return np.repeat(np.arange(start + 1, start + count + 1, dtype=np.float32)[:, None], HIDDEN, 1)


def with_states(first: int, text: Sequence[int]) -> list[tuple[int, int, float]]:
    """Tokens at positions from `first` on, each with the model's state of the position before."""
    return [(p, id, float(p)) for p, id in enumerate(text, first)]


def test_a_prompt_is_read_behind_each_of_its_chunks():
    text = [1 + i % 40 for i in range(60)]
    desk = Desk(text)
    desk.step(0, 40)
    assert desk.read() == [with_states(0, text[:40])]
    desk.step(40, 20, fresh=[7])
    assert desk.read() == [with_states(40, text[40:])]


def test_a_guess_goes_on_with_states_of_its_own_and_reads_the_models_afterwards():
    desk = Desk([1 + i for i in range(20)])
    desk.step(0, 20, fresh=[30])
    desk.read()
    assert desk.step(20, 1, 3, fresh=[31, 32, 9]) == [31, 32, 33]
    assert desk.read() == [[(20, 30, 20.0)], [(21, 31, OWN + 20)], [(22, 32, OWN + 21)]]
    assert desk.step(23, 1, 1, fresh=[10]) == [10]
    assert desk.read() == [[(21, 31, 21.0), (22, 32, 22.0), (23, 9, 23.0)]]


def test_an_answer_is_read_some_tokens_at_a_time():
    desk = Desk([1 + i for i in range(20)])
    desk.step(0, 20, fresh=[30])
    desk.read()
    for i in range(2 * READ_TOKENS):
        desk.step(20 + i, 1, fresh=[31])
    assert [len(each) for each in desk.read()] == [READ_TOKENS] * 2


def test_behind_a_prefix_of_others_one_token_is_read_with_zeros():
    text = [1 + i for i in range(40)]
    desk = Desk(text)
    for block in range(5):
        desk.drafter._is_whole[block] = True
    desk.step(5 * SIZE, 40 - 5 * SIZE, fresh=[3])
    assert desk.read() == [[(20, 21, 0.0), *with_states(21, text[21:])]]


def test_of_a_prefix_that_it_lacks_little_is_read_at_once_and_more_when_it_is_asked():
    desk = Desk([5] * 120)
    desk.step(20, 20)
    assert desk.read() == [[(p, 5, float(p) if p > 20 else 0.0) for p in range(40)]]
    far = Desk([5] * 120)
    far.step(100, 20, fresh=[5])
    assert far.read() == []
    assert far.step(120, 1, 1, fresh=[6]) == []
    first, rest = far.read()
    assert (len(first), [state for _, _, state in first]) == (LEAST_ROOM, [0.0] * LEAST_ROOM)
    assert [(p, state) for p, _, state in rest] == [(p, float(p) if p > 100 else 0.0) for p in range(LEAST_ROOM, 121)]
    assert far.step(121, 1, 1, fresh=[7]) == [7]
    assert far.read() == [[(121, 6, 121.0)]]


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 9)), max_size=12), st.integers(0, 40), st.integers(0, 12))
def test_states_are_those_that_were_put_last(puts, start, count):
    """As a table by position in which what is put ends what is known, and joins what it reaches."""
    states, known = States(0, np.empty((0, HIDDEN), np.float32)), {}
    for turn, (first, length) in enumerate(puts, 1):
        own = {first + i: float(100 * turn + i) for i in range(length)}
        joins = states.first <= first <= states.end
        known = {p: value for p, value in known.items() if joins and p < first} | own
        states.put(first, np.array([[value] * HIDDEN for value in own.values()], np.float32).reshape(-1, HIDDEN))
    assert states.before(start, start + count)[:, 0].tolist() == [
        known.get(p - 1, 0.0) for p in range(start, start + count)
    ]
    states.forget_before(start)
    assert len(states.rows) == sum(p >= start for p in known)
