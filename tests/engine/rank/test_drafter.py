"""Drafter: what it reads of which text, in whose blocks, and what it guesses; over a backend that repeats its input."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvloom.contract.messages import BY_MODEL, Batch, StepOutput, Transfer, Work
from kvloom.rank.drafter import LEAST_ROOM, Drafter
from kvloom.rank.kernels.backend import Head, Ragged

SIZE, NUM_BLOCKS, VOCAB = 4, 32, 50


class Counting:
    """A backend whose guess behind a token is the next number. Notes what it is given to read: (ids, positions)."""

    name, num_blocks, block_size, weight_bytes, kv_bytes = "counting", NUM_BLOCKS, SIZE, 7, 9
    whole_spec = SimpleNamespace(vocab_size=VOCAB)
    copy = None

    def __init__(self, chooses: bool) -> None:
        self.read: list[tuple[list[int], list[int]]] = []
        self.num_again = 0
        self._chooses = chooses
        self._last: list[int] = []
        self.kv = np.zeros((NUM_BLOCKS, SIZE), np.uint8)

    @property
    def kv_parts(self) -> tuple[Any, ...]:
        return (self.kv,)

    @property
    def kv_layers(self) -> list[list[Any]]:
        return [[self.kv]]

    def step(self, batch: Ragged, rows: Any, tops: list[int], states: Any, choices: Any) -> Head:
        assert all(0 <= id < VOCAB for id in batch.ids)
        assert all(batch.block_table[s, p // SIZE] >= 0 for s, p in self._each(batch))
        self.read.append((batch.ids.tolist(), batch.pos.tolist()))
        self._last = [int(batch.ids[row]) + 1 for row in rows]
        ids = np.array(self._last, np.int32)
        empty = np.empty((0, 0), np.float32)
        tokens = ids if self._chooses else np.empty(0, np.int32)
        return Head(tops, empty, np.zeros((len(ids), 1), np.float32), ids[:, None], empty, tokens)

    def step_again(self, new_blocks: Sequence[Any], new_windows: Sequence[Any] = ()) -> Any:
        self.num_again += 1
        self._last = [token + 1 for token in self._last]
        return np.array(self._last, np.int32)

    @staticmethod
    def _each(batch: Ragged) -> list[tuple[int, int]]:
        starts = batch.qstart.tolist()
        return [(s, int(batch.pos[i])) for s in range(len(starts) - 1) for i in range(starts[s], starts[s + 1])]


class Desk:
    """A drafter, and texts as the runner knows them."""

    def __init__(self, chooses: bool = True, max_seq_len: int = 60, vocab_size: int = VOCAB) -> None:
        self.backend = Counting(chooses)
        self.drafter = Drafter(self.backend, max_seq_len, vocab_size)  # type: ignore[arg-type]
        self.texts: dict[int, list[int]] = {}

    def ask(self, *works: Work, room: int = 0, loads: Sequence[Transfer] = ()) -> list[list[int]]:
        self.drafter.follow(Batch([], list(works), [], loads=list(loads)))
        output = StepOutput([], [], 0.0)
        done = self.drafter.draft(works, self.texts.__getitem__, room, output)
        assert [(work.id, work.draft) for work in done if work.id in {one.id for one in output.drafts}] == [
            (one.id, one.token_ids) for one in output.drafts
        ]
        assert all(work.num_tokens - len(work.draft) == 1 for work in done)
        return [work.draft for work in done]

    def end(self, *texts: Sequence[int]) -> None:
        """The step has ended with these texts."""
        self.texts |= {i: list(text) for i, text in enumerate(texts)}
        self.drafter.settle([], np.empty((0, 0), np.float32), self.texts.__getitem__)


def decode(id: int, text: Sequence[int], count: int, blocks: Sequence[int], first: int = 0) -> Work:
    return Work(id, len(text) - 1, 1 + count, first, list(blocks), [BY_MODEL] * count)


@pytest.mark.parametrize("chooses", [True, False])
def test_all_that_draft_do_so_together_and_each_as_far_as_it_is_asked(chooses):
    desk = Desk(chooses)
    desk.texts = {0: [1, 2, 3], 1: [20], 2: [9, 9]}
    plain = Work(2, 1, 1, 0, [8])
    first, last = decode(0, desk.texts[0], 4, [0, 1]), decode(1, desk.texts[1], 2, [4])
    assert desk.ask(first, plain, last) == [[4, 5, 6, 7], [], [21, 22]]
    assert desk.backend.read[0] == ([1, 2, 3, 20], [0, 1, 2, 0])
    assert desk.backend.read[1] == ([4, 21], [3, 1])
    assert desk.backend.read[2] == ([5], [4])
    assert desk.backend.num_again == chooses


def test_behind_given_tokens_it_goes_on():
    desk = Desk()
    desk.texts = {0: [1, 2]}
    work = Work(0, 0, 4, 0, [0, 1], [30, BY_MODEL, BY_MODEL])
    desk.drafter.follow(Batch([], [work], []))
    (done,) = desk.drafter.draft([work], desk.texts.__getitem__, 0, StepOutput([], [], 0.0))
    assert done.draft == [30, 31, 32]


def test_what_it_read_of_right_guesses_is_not_read_again():
    desk = Desk()
    desk.texts = {0: [1, 2]}
    desk.ask(decode(0, [1, 2], 4, [0, 1]))
    desk.end([1, 2, 3, 4, 9])
    desk.backend.read.clear()
    assert desk.ask(decode(0, [1, 2, 3, 4, 9], 2, [], first=2)) == [[10, 11]]
    assert desk.backend.read == [([9], [4])]  # from there it goes on by itself


def test_a_found_prefix_is_known_as_far_as_it_was_read():
    desk = Desk()
    text = list(range(1, 12))
    desk.texts = {0: text}
    desk.ask(decode(0, text, 1, [0, 1, 2]))
    desk.end([*text, 40])
    desk.texts[1] = text
    desk.backend.read.clear()
    desk.drafter.follow(Batch([], [Work(1, 8, 3, 0, [0, 1, 5])], []))
    desk.ask(decode(1, text, 1, [], first=3))
    assert desk.backend.read == [([9, 10, 11], [8, 9, 10])]


def test_a_block_that_was_given_to_another_text_is_read_again():
    desk = Desk()
    text = list(range(1, 6))
    desk.texts = {0: text}
    desk.ask(decode(0, text, 1, [0, 1]))
    desk.end([*text, 40])
    other = [30 + i for i in range(5)]
    desk.texts = {1: other, 2: other}
    desk.drafter.follow(Batch([], [Work(1, 0, 5, 0, [0, 1])], [0]))  # computed by the model alone
    desk.drafter.follow(Batch([], [Work(2, 4, 1, 0, [0, 2])], []))
    desk.backend.read.clear()
    desk.ask(decode(2, other, 1, [], first=2))
    assert desk.backend.read == [(other, [0, 1, 2, 3, 4])]


def test_what_lay_in_a_block_in_whose_place_another_comes_is_read_again():
    desk = Desk()
    text = list(range(1, 7))
    desk.texts = {0: text}
    desk.ask(decode(0, text, 1, [0, 1]))
    desk.end([*text, 40])
    desk.backend.read.clear()
    desk.ask(decode(0, [*text, 40], 1, [9], first=1))
    assert desk.backend.read == [([5, 6, 40], [4, 5, 6])]


@pytest.mark.parametrize("how", ["loaded", "released", "swapped"])
def test_blocks_that_come_from_elsewhere_are_read_again(how):
    desk = Desk()
    text = list(range(1, 6))
    desk.texts = {0: text}
    desk.ask(decode(0, text, 1, [0, 1]))
    desk.end([*text, 40])
    found = Work(1, 4, 1, 0, [0, 2], loads=[(3, 0)] if how == "swapped" else [])
    if how == "loaded":
        desk.drafter.follow(Batch([], [], [], loads=[Transfer(1, [0], [b"k"])]))
    if how == "released":
        desk.drafter.follow(Batch([], [], [], release=[0]))
    desk.texts[1] = text
    desk.drafter.follow(Batch([], [found], []))
    desk.backend.read.clear()
    desk.ask(decode(1, text, 1, [], first=2))
    assert desk.backend.read == [(text, [0, 1, 2, 3, 4])]


def test_a_long_text_is_read_in_parts_beside_one_that_drafts():
    desk = Desk()
    text = [1] * (LEAST_ROOM - 14)
    desk.texts = {0: [5], 1: text, 2: text}
    works = [decode(0, [5], 2, [0]), decode(1, text, 1, range(1, 14)), decode(2, text, 1, range(14, 27))]
    assert desk.ask(*works) == [[6, 7], [2], []]
    desk.end([5, 6], [*text, 3], [*text, 3])
    assert len(desk.backend.read[0][0]) == LEAST_ROOM
    assert desk.ask(*(decode(id, desk.texts[id], 1, [], first=14) for id in (0, 1, 2))) == [[7], [4], [4]]


def test_it_guesses_within_its_context_and_the_vocabulary_of_both():
    desk = Desk(max_seq_len=6, vocab_size=12)
    desk.texts = {0: [1, 2, 3, 4], 1: [1] * 7, 2: [9], 3: [70]}
    works = [decode(id, text, 5, [4 * id, 4 * id + 1, 4 * id + 2]) for id, text in desk.texts.items()]
    assert desk.ask(*works) == [[5, 6, 7], [], [10, 11], [1, 2, 3, 4, 5]]
