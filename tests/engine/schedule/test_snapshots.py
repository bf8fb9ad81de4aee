"""Snapshots of states in the prefix cache: where they are taken, which are found, which are given up, and that answers
are those of computing everything.
"""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from kvloom.contract.config import Limits
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.schedule import prefix
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.commit import apply_step, check, commit_step, release_seq
from kvloom.engine.schedule.prefix import find_prefix, mark_positions
from kvloom.engine.schedule.scheduler import plan_step
from kvloom.engine.schedule.seq import Seq, Status
from kvloom.engine.schedule.snapshots import Snapshot, Snapshots
from kvloom.rank.byte_tokenizer import EOS_ID
from tests.engine.schedule.test_scheduler import BLOCK, sampling_ids
from tests.engine.test_engine import EngineMachine, truth
from tests.support.engine.engines import drain, in_process, run_all, tokens_of
from tests.support.engine.stateful import stateful_engine, stateful_runner

ANSWER = 100


@pytest.mark.parametrize(
    ("start", "num_known", "most", "found"),
    [
        (0, 0, 0, ()),
        (0, 0, 15, ()),
        (0, 0, 16, (16,)),
        (0, 0, 300, (256, 300)),
        (0, 0, 260, (260,)),
        (0, 100, 300, (100, 256, 300)),
        (0, 295, 300, (256, 300)),
        (0, 5, 300, (256, 300)),
        (250, 250, 300, (300,)),
        (290, 290, 300, ()),
        (0, 0, 2048, (*range(256, 2048, 256), 2048)),
        (0, 0, 4000, (512, 1024, 1536, 2048, 2560, 3072, 3584, 4000)),
    ],
)
def test_states_are_kept_before_the_last_token_where_prompts_part_and_now_and_then(start, num_known, most, found):
    marks = mark_positions(start, num_known, most)
    assert tuple(position for position, _ in marks) == found
    assert [is_lasting for _, is_lasting in marks] == [position in (num_known, most) for position in found]


def snapshots_of(*positions: int, most: int = 3) -> tuple[Snapshots, list[Snapshot]]:
    pool, found = Snapshots(1, most), []
    for place, position in enumerate(positions):
        base = found[-1] if found else None
        assert pool.make_room(position, base)
        found.append(pool.add(Snapshot(position, b"%d" % place, (place,), place, place, base)))
    return pool, found


def test_a_full_pool_gives_up_the_one_that_saves_least_and_counts_its_tokens_for_the_next_one():
    pool, (first, second, third) = snapshots_of(100, 110, 400)
    assert pool.make_room(700, third)
    assert [each.is_forgotten for each in (first, second, third)] == [False, True, False]
    pool.add(Snapshot(700, b"x", (7,), 7, 7, third))
    assert pool.make_room(1000, None)
    assert first.is_forgotten, "it saves 100 tokens, the one behind it 300"


def test_one_that_would_save_less_than_all_others_is_not_let_in():
    pool, found = snapshots_of(100, 200, 300)
    assert not pool.make_room(310, found[-1])
    assert not any(each.is_forgotten for each in found)


def test_one_that_its_conversation_has_gone_past_goes_before_the_last_one():
    pool, (first, second) = snapshots_of(100, 160, most=2)
    assert pool.make_room(200, None)
    assert (first.is_forgotten, second.is_forgotten) == (True, False)


def test_where_conversations_part_counts_in_full():
    pool, (first, second) = snapshots_of(100, 160, most=3)
    assert pool.make_room(150, first)
    pool.add(Snapshot(150, b"0", (5,), 5, 5, first))
    assert pool.make_room(200, None)
    assert (first.is_forgotten, second.is_forgotten) == (False, False)


def test_one_that_was_begun_with_stays_longer_than_one_that_was_not():
    pool, made = Snapshots(1, 3), [Snapshot(1000, b"%d" % i, (i,), i, i, None) for i in range(5)]
    for each in made[:4]:
        assert pool.make_room(1000, None)
        pool.add(each)
    pool.touch(made[1])
    assert pool.make_room(1000, None)
    assert [each.is_forgotten for each in made[:4]] == [True, False, True, False]


@pytest.mark.parametrize("saved", [1000, 100])
def test_what_nobody_asks_for_ages(saved):
    """Each one given up raises what a new one counts, and so does each one that is not let in."""
    pool, (old, used, other) = Snapshots(1, 3), [Snapshot(5000, b"%d" % i, (i,), i, i, None) for i in range(3)]
    for each in (old, used, other):
        assert pool.make_room(5000, None)
        pool.add(each)
    for i in range(400):
        if pool.make_room(saved, None):
            pool.add(Snapshot(saved, b"n%d" % i, (i,), 10 + i, 10 + i, None))
        pool.touch(used)
    assert [each.is_forgotten for each in (old, used, other)] == [True, False, True]


def test_with_its_block_a_snapshot_is_forgotten():
    pool, (first, second, _) = snapshots_of(100, 200, 300)
    for block in (4, 5, second.block):
        pool.known.learn(block, b"1", (1, block))
    assert pool.num_known(b"1", (1, 5, 6)) == 2
    pool.forget(second.block)
    assert (second.is_forgotten, first.num_longer, pool.count) == (True, 1, 2)
    assert pool.find(b"1", (1,)) is None


def compute(seq: Seq, pool: BlockPool, limits: Limits) -> None:
    """Computes its prompt, and a token more, and lets it end."""
    while seq.num_computed < seq.num_prompt:
        plan = plan_step([seq], pool, limits)
        apply_step(plan, pool)
        commit_step(plan, {id: [7] for id in sampling_ids(plan)}, pool, BLOCK)
        check([seq], pool, BLOCK)
    release_seq(seq, pool, Status.FINISHED)
    check([], pool, BLOCK)


def made(id: int, tokens: Sequence[int]) -> Seq:
    seq = Seq(id, list(tokens), len(tokens))
    seq.extend_hashes(BLOCK)
    return seq


PROMPTS = st.lists(st.lists(st.sampled_from([1, 2]), min_size=1, max_size=18), min_size=1, max_size=8)


@settings(max_examples=150)
@given(
    prompts=PROMPTS,
    num_common=st.integers(1, 20),
    more=st.lists(st.sampled_from([1, 2, 7]), max_size=5),
    least=st.integers(1, 5),
    gone=st.sets(st.integers(0, 11), max_size=2),
)
def test_the_longest_position_is_found_at_which_every_kind_of_layer_has_what_it_needs(
    prompts, num_common, more, least, gone
):
    """Against an oracle that looks at all snapshots and all blocks; `gone` are blocks with other contents by now."""
    wanted = ([*prompts[0], 7][:num_common] + more) or [1]
    pool, limits = BlockPool(12, True, 0, Snapshots(1, 4, BLOCK)), Limits(1, 7, BLOCK)
    known: dict[tuple[bytes, tuple[int, ...]], list[int]] = {}
    apart, prefix.LEAST_APART = prefix.LEAST_APART, least
    for id, tokens in enumerate(prompts):
        compute(made(id, tokens), pool, limits)
        whole = made(id, [*tokens, 7])
        for position in range(1, len(whole.token_ids) + 1):
            index = (position - 1) // BLOCK
            tail = tuple(whole.token_ids[index * BLOCK : position])
            known[whole.parent_hash(index, BLOCK), tail] = whole.token_ids[:position]
    prefix.LEAST_APART = apart
    for block in gone:
        pool._forget(block)
    seq = made(99, wanted)
    for may_copy in (True, False):
        fitting = [
            each.position
            for each in pool.snapshots
            if known[each.parent, each.tail] == wanted[: each.position]
            and each.position < len(wanted)
            and (may_copy or each.position % BLOCK == 0)
            and all(pool.block_of(key) is not None for key in seq.hashes[: each.position // BLOCK])
        ]
        found = find_prefix(seq, pool, BLOCK, may_copy)
        assert found.start == max(fitting, default=0)
        assert found.hits == [pool.block_of(key) for key in seq.hashes[: found.start // BLOCK]]
        assert (found.part >= 0) == (found.start % BLOCK > 0)


def words(count: int, seed: int) -> list[int]:
    made = random.Random(seed)
    return [made.randrange(128) for _ in range(count)]


class Talk:
    """Asks an engine, whose answers must be those of the model; knows how many tokens of each prompt it computed."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._count = engine, 0

    def ask(self, tokens: Sequence[int], max_tokens: int = ANSWER) -> tuple[list[int], int]:
        self._count += 1
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        request = Request(f"r{self._count}", tuple(tokens), params)
        found = run_all(self.engine, request)[request.id]
        assert tokens_of(found) == truth(request, max_tokens)
        return tokens_of(found), len(tokens) - found[0].num_cached_tokens


def engine_of(block_size: int, **fields: int) -> Engine:
    return stateful_engine(20_000 // block_size, block_size, 8000, **{"num_snapshots": 30, **fields})


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_a_conversation_is_not_computed_twice(block_size):
    talk, history = Talk(engine_of(block_size)), words(1200, 0)
    for turn in range(1, 6):
        history += words(60, turn)
        asked, (answer, num_computed) = list(history), talk.ask(history)
        assert num_computed <= (len(history) if turn == 1 else 60 + 1)
        history += answer
    _, again = talk.ask(asked)
    assert again == 1, "a regenerated answer computes the last token of its prompt"
    edited = [*history[:1300], 129, *history[1301:]]
    _, behind = talk.ask(edited)
    assert behind <= len(edited) - 1300 + 128, "from the nearest snapshot"


@pytest.mark.parametrize("block_size", [16, 32, 128])
def test_conversations_that_part_are_computed_from_there_from_the_third_one_on(block_size):
    talk, common = Talk(engine_of(block_size)), words(1200, 0)
    computed = [talk.ask([*common, 200 + i, *words(59, i)], 1)[1] for i in range(6)]
    assert computed == [1260, 60 + 1200 - 1024, 60, 60, 60, 60]
    stats = talk.engine.stats()
    assert (stats.total_snapshot_hits, stats.total_stateless_tokens) == (5, 1200 - 1024)
    assert (stats.total_window_hits, stats.total_windowless_tokens, stats.num_saving_states) == (0, 0, 0)
    assert stats.total_block_hits == 1024 // block_size + 4 * -(-1200 // block_size), "part of one is copied"


def test_an_answer_that_ended_by_itself_is_a_prefix_with_its_last_token():
    """The step that was under way has computed it."""
    params = SamplingParams(temperature=0, max_tokens=ANSWER)
    ends = (words(20, seed) for seed in range(100))
    request = next(r for r in (Request("a", tuple(each), params) for each in ends) if EOS_ID in truth(r, ANSWER)[:-1])
    answer = truth(request, ANSWER)
    answer = answer[: answer.index(EOS_ID) + 1]
    for block_size in (16, 20 + len(answer)):  # its last block is full, or is not
        talk = Talk(engine_of(block_size))
        assert tokens_of(run_all(talk.engine, request)["a"]) == answer
        assert talk.ask([*request.prompt_ids, *answer, 5], 1)[1] == 1


@pytest.mark.parametrize("block_size", [16, 32, 128])
@pytest.mark.parametrize("num_end", [2, 5, 16])
def test_where_prompts_leave_the_ones_before_shortly_before_their_ends_is_learned(block_size, num_end):
    """Reasoning is no part of history: the next prompt leaves the last one at the marks behind which the answer begins,
    and those hold `num_end` tokens.
    """
    talk, history, end = Talk(engine_of(block_size)), words(300, 0), [200] * num_end
    beyond = []
    for turn in range(1, 6):
        talk.ask([*history, *words(40, turn), *end], 3)
        history += words(40, turn)
        told = [201, *words(50, 20 + turn)]
        beyond.append(talk.ask([*history, *told, *end], 3)[1] - len(told) - num_end)
        history += told
    assert beyond[0] > 0
    assert beyond[1:] == [0] * 4
    assert talk.ask([*history, *end], 1)[1] <= 16, "a regenerated answer"


def test_a_prompt_that_is_known_to_its_last_block_computes_one_token():
    talk = Talk(engine_of(16))
    assert [talk.ask(words(33, 0), 1)[1] for _ in range(2)] == [33, 1]


def test_what_is_worth_less_than_all_that_is_kept_is_computed_again():
    talk = Talk(engine_of(16, num_snapshots=1))
    assert [talk.ask(words(count, count), 1)[1] for count in (200, 40, 40, 200)] == [200, 40, 40, 1]


def test_answers_to_one_prompt_compute_it_once():
    engine = engine_of(16)
    requests = [Request(f"{i}", tuple(words(300, 0)), SamplingParams(seed=i, max_tokens=9)) for i in range(4)]
    found = run_all(engine, *requests)
    assert [found[r.id][0].num_cached_tokens for r in requests] == [0, 299, 299, 299]


def test_no_more_snapshots_are_kept_than_there_is_room_for():
    talk = Talk(engine_of(16, num_snapshots=3))
    for seed in range(6):
        talk.ask(words(700, seed), 3)
    stats = talk.engine.stats()
    assert (stats.num_snapshots, stats.max_snapshots) == (3, 3)
    assert stats.num_evicted_snapshots > 0


def test_without_room_for_snapshots_nothing_is_cached():
    talk = Talk(engine_of(16, num_snapshots=0))
    assert [talk.ask(words(40, 0), 3)[1] for _ in range(2)] == [40, 40]
    assert talk.engine.stats().num_cached_blocks == 0


def test_a_prefix_is_forgotten_with_the_cache():
    talk = Talk(engine_of(16))
    talk.ask(words(40, 0), 3)
    talk.engine.reset_prefix_cache()
    assert talk.ask(words(40, 0), 3)[1] == 40
    talk.engine.release_free()
    talk.engine.check()
    assert talk.ask(words(40, 0), 3)[1] == 40


def test_of_an_answer_that_was_cut_off_no_state_is_kept():
    """It has computed tokens that nobody was told of."""
    engine = engine_of(16)
    engine.add(Request("a", tuple(words(40, 0)), SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)))
    for _ in range(20):
        engine.step()
    engine.abort("a")
    drain(engine)
    assert [each.position for each in engine._pool.snapshots] == [39]


def test_a_request_that_is_dropped_while_its_state_is_copied_leaves_none():
    engine = engine_of(16)
    engine.add(Request("a", tuple(words(40, 0)), SamplingParams(max_tokens=3)))
    engine.start_step()
    assert engine._pool.snapshots.num_coming == 1
    engine.abort("a")
    engine.check()
    drain(engine)
    assert list(engine._pool.snapshots) == []


@pytest.mark.parametrize("num_snapshots", [0, 4])
def test_a_state_waits_on_the_host_with_its_blocks(num_snapshots):
    """Until it comes back, its request is dropped, or the rank dies."""
    sizes = {"num_blocks": 12, "num_snapshots": num_snapshots, "num_host_blocks": 40}
    asked = [Request(f"{i}", tuple(words(10, i)), SamplingParams(seed=i, max_tokens=30)) for i in range(4)]
    engine, told = stateful_engine(**sizes), []
    for request in asked:
        engine.add(request)
    for dropped in ("3", ""):
        while engine.has_work and not engine.stats().num_swapped:
            told += engine.step()
            engine.check()
        waiting = {live.request.id: live.seq for live in engine._seqs.values() if live.seq.host_blocks}
        assert dropped in (*waiting, "")
        assert [len(seq.host_state) for seq in waiting.values()] == [2]
        for seq in waiting.values():
            assert find_prefix(seq, engine._pool, 4).start == seq.num_swapped
        engine.abort(dropped)
        engine.check()
    told += engine.suspend()
    engine._executor = in_process(stateful_runner(4, num_snapshots, num_blocks=12, block_size=4), engine.config)
    told += engine.resume({}) + [delta for deltas in drain(engine).values() for delta in deltas]
    for request in asked[:3]:
        tokens = tokens_of([delta for delta in told if delta.request_id == request.id])
        assert tokens == truth(request, len(tokens))
    assert engine.stats().num_free_host_blocks == engine.stats().num_host_blocks


class StatefulEngineMachine(EngineMachine):
    """The same for a model whose layers keep states; the fake model knows nothing but to compute everything."""

    @initialize(
        run_ahead=st.booleans(), num_snapshots=st.integers(0, 5), least=st.sampled_from([1, 3, 16]),
        num_host_blocks=st.sampled_from([0, 6, 30]),
    )  # fmt: skip
    def make(self, run_ahead: bool, num_snapshots: int, least: int, num_host_blocks: int) -> None:
        self.least, prefix.LEAST_APART = prefix.LEAST_APART, least
        sizes = {"num_blocks": 9, "max_seq_len": 36, "max_batch": 3, "max_tokens_per_step": 9}
        sizes |= {"num_states": 3, "num_snapshots": num_snapshots, "num_host_blocks": num_host_blocks}
        self.engine = stateful_engine(**sizes, run_ahead=run_ahead)

    @precondition(lambda self: self.deltas)
    @rule(data=st.data(), num_answer=st.integers(0, 20), more=st.lists(st.integers(1, 3), max_size=3))
    def go_on(self, data: st.DataObject, num_answer: int, more: list[int]) -> None:
        """A request that begins with another's prompt and a part of its answer."""
        before = self.requests[data.draw(st.sampled_from(sorted(self.deltas)))]
        tokens = [*before.prompt_ids, *truth(before, num_answer), *more][:35]
        name, seed = f"r{len(self.requests)}", len(self.requests)
        self.requests[name] = Request(name, tuple(tokens), SamplingParams(seed=seed, max_tokens=5))
        self.engine.add(self.requests[name])

    def teardown(self) -> None:
        prefix.LEAST_APART = self.least
        super().teardown()


TestStatefulEngineMachine = StatefulEngineMachine.TestCase
