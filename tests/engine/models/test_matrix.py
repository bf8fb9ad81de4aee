"""Kinds of layers x ways in which keys and states come about x sizes of blocks: every answer is the one that is
computed alone, without a cache. Models are tiny, kernels those that serve.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.messages import Batch, Runner
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.pool.agent import Agent
from kvloom.rank.main import open_runner
from tests.support.engine.engines import drain, engine_over, in_process, run_all, tokens_of
from tests.support.engine.greedy import prompt
from tests.support.models.checkpoints import save, tiny_model
from tests.support.pool.agents import running_agent
from tests.support.waiting import until

KINDS = {
    "all tokens": ("qwen3", {}),
    "windows": ("gemma3", {"head_dim": 32}),
    "states": ("qwen3.5", {"head_dim": 128}),
    "latent": ("deepseek v3", {}),
    "states and latent": ("kimi linear", {}),
}
LENGTHS = (100, 250, 380)
NUM_TOKENS = 40
MAX_LEN = 420
# The likeliest token of a tiny Gemma is always the one before: what is drawn shows any change of logits.
DRAWN = SamplingParams(temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True)
FACTORY = "kvloom.rank.tier.ems:open_tier"
ASKED = [Request(f"{n}", prompt(n), DRAWN) for n in LENGTHS]


def answers(engine: Engine, *asked: Request) -> list[list[int]]:
    """All asked for at once."""
    found = run_all(engine, *(asked or ASKED))
    return [tokens_of(found[request.id]) for request in asked or ASKED]


@dataclass(frozen=True)
class Model:
    """One kind of layers, in blocks of `size` tokens; `want`: the answer to each of ASKED."""

    kind: str
    folder: Path
    size: int
    want: list[list[int]]

    def num_of(self, *lengths: int) -> int:
        """Blocks of so many tokens each."""
        return sum(-(-length // self.size) for length in lengths)

    def runner(self, num_blocks: int | None = None, **fields: object) -> Runner:
        """With room for four of the longest sequences, if nothing else is said."""
        if "kv_cache_bytes" not in fields:
            num_blocks = num_blocks or self.num_of(*[MAX_LEN] * 4)
        config = EngineConfig(
            model=str(self.folder),
            backend="cpu",
            **{"block_size": self.size, "max_seq_len": MAX_LEN, "max_batch": 4, "num_blocks": num_blocks, **fields},
        )
        return open_runner(config, [], lambda done, total: None)

    def engine(self, num_blocks: int | None = None, **fields: object) -> Engine:
        return engine_over(self.runner(num_blocks, **fields))

    def over_pool(self, agent: Agent) -> tuple[Engine, Runner]:
        """One at a time; close the runner."""
        tier = TierConfig(FACTORY, 30.0, {"socket": str(agent.config.socket)}, is_watched=True)
        runner = self.runner(kv_tier=tier)
        until(lambda: runner.run(Batch([], [], [])).is_tier_up)
        return engine_over(runner, kv_tier=TierConfig(FACTORY, 30.0)), runner


@pytest.fixture(scope="module", params=KINDS)
def computed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """With the answers, each computed alone, in blocks of 16."""
    name, fields = KINDS[request.param]
    folder = save(tiny_model(name, max_position_embeddings=512, **fields), tmp_path_factory.mktemp("model"))
    engine = engine_over(Model(request.param, folder, 16, []).runner(), enable_prefix_cache=False)
    return Model(request.param, folder, 16, [answers(engine, asked)[0] for asked in ASKED])


@pytest.fixture(params=[16, 32, 128])
def model(request: pytest.FixtureRequest, computed: Model) -> Model:
    return Model(computed.kind, computed.folder, request.param, computed.want)


@pytest.fixture
def agent() -> Iterator[Agent]:
    with running_agent(pool_bytes=64 << 20) as running:
        yield running


def test_computed(model):
    engine = model.engine()
    assert answers(engine) == model.want
    assert engine.stats().total_cached_tokens == 0


def test_cached(model):
    engine = model.engine()
    assert answers(engine) == answers(engine) == model.want
    assert engine.stats().total_cached_tokens >= 128


def test_evicted_in_part(model):
    """The first and the last one fit together only in part."""
    engine = model.engine(model.num_of(MAX_LEN) + 1)
    for index in (2, 1, 2):
        assert answers(engine, ASKED[index]) == [model.want[index]]
    assert engine.stats().num_evicted_blocks > 0


def test_from_the_tier(model, agent):
    for is_warm in (False, True):
        engine, runner = model.over_pool(agent)
        assert answers(engine) == model.want
        stats = engine.stats()
        assert (stats.total_tier_loaded_blocks > 0) == is_warm
        assert (stats.total_tier_loaded_windows > 0) == (is_warm and model.kind == "windows")
        assert (stats.total_tier_loaded_states > 0) == (is_warm and model.kind.startswith("states"))
        runner.close()


def test_partly_from_the_tier(model, agent):
    """The other engine had only a beginning of the longest prompt."""
    for asked in (Request("begun", prompt(380)[:260], DRAWN), ASKED[2]):
        engine, runner = model.over_pool(agent)
        found = answers(engine, asked)
        runner.close()
    assert found == [model.want[2]]
    assert 128 <= engine.stats().total_cached_tokens <= 260
    assert engine.stats().total_tier_loaded_blocks > 0


@pytest.mark.usefixtures("swaps_always")
@pytest.mark.parametrize("num_host_blocks", [0, 80], ids=["computed again", "swapped"])
def test_preempted(model, num_host_blocks):
    """All prompts fit, and one block more."""
    engine = model.engine(model.num_of(*LENGTHS) + 1, num_host_blocks=num_host_blocks)
    assert answers(engine) == model.want
    stats = engine.stats()
    assert stats.total_preemptions > 0
    assert (stats.total_swapped > 0) == (num_host_blocks > 0)
    assert stats.num_free_host_blocks == num_host_blocks


def test_crashed(model):
    engine = model.engine()
    for request in ASKED:
        engine.add(request)
    deltas = [delta for _ in range(9) for delta in engine.step()] + engine.suspend()
    engine._executor = in_process(model.runner(), engine.config)
    deltas += engine.resume({})
    rest = drain(engine)
    told = [[each for each in deltas if each.request_id == request.id] for request in ASKED]
    assert [tokens_of(own + rest[request.id]) for own, request in zip(told, ASKED, strict=True)] == model.want
    assert engine.stats().total_resumed == 3


def test_forked_by_n(model):
    engine = model.engine()
    choices = [Request(f"choice {i}", ASKED[1].prompt_ids, DRAWN) for i in range(3)]
    assert answers(engine, *choices) == [model.want[1]] * 3
    assert engine.stats().total_cached_tokens >= 2 * 128


NUM_CONVERSATIONS = 64


def conversations(engine: Engine, look: Callable[[Engine], None]) -> list[list[int]]:
    """Two turns of each, all at once; `look` sees the engine after each step."""
    told: dict[str, list[int]] = {}
    for turn in range(2):
        for i in range(NUM_CONVERSATIONS):
            tokens = [*told.get(f"{turn - 1} {i}", ()), *prompt(20 + i % 5), i]
            told[f"{turn} {i}"] = tokens
            params = replace(DRAWN, max_tokens=6)
            engine.add(Request(f"{turn} {i}", tuple(tokens), params))
        while engine.has_work:
            for delta in engine.step():
                told[delta.request_id] = [*told[delta.request_id], *delta.token_ids]
            look(engine)
    return list(told.values())


def test_many_live_conversations_never_go_above_the_budget(computed):
    """Of bytes that keys, windows and states may take, and of the share that snapshots may."""
    fields = {"max_seq_len": 64, "max_batch": 8}
    ample = conversations(engine_over(computed.runner(1000, **fields)), lambda engine: None)
    few = computed.runner(4, **fields).info
    budget = 8 * few.kv_bytes + 32 * few.state_bytes
    runner = computed.runner(None, num_host_blocks=0, kv_cache_bytes=budget, **fields)
    info, used = runner.info, []

    def look(engine: Engine) -> None:
        stats = engine.stats()
        windows = stats.num_window_blocks - stats.num_free_window_blocks
        of_all, of_window = info.block_bytes
        held = (stats.num_blocks - stats.num_free_blocks) * of_all + windows * of_window
        used.append(held + stats.snapshot_bytes + stats.num_running * info.state_bytes)
        assert stats.snapshot_bytes <= budget // 4
        engine.check()

    assert info.kv_bytes + (info.num_states + info.num_snapshots) * info.state_bytes <= budget
    assert conversations(engine_over(runner), look) == ample
    assert budget // 4 < max(used) <= budget
