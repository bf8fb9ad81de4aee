"""Models whose layers, all or some, see a window: their blocks behind it are freed, and answers stay the same, however
they were computed and wherever keys and values have been.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.windows import reach_of, windowed
from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.rank import loading
from kvloom.rank.fake import ByteTokenizer
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from tests.support.engine.engines import engine_over, run_all, tokens_of
from tests.support.engine.executors import opened as executor_of
from tests.support.models.checkpoints import save, tiny_model
from tests.support.pool.agents import running_agent

WINDOW = 7
REACH = WINDOW + 127  # the kernels read keys in chunks of 128
LENGTH = 320  # most tokens of a prompt with its answer
MODELS = ["mistral, window of 7", "gemma3", "gpt-oss", "gemma4, shared keys and inputs of layers"]
LENGTHS = {"cpu": (3, 120, 250), "reference": (130, 290)}
MOST = {"cpu": 60, "reference": 30}  # tokens of an answer; those of the kernels go on over REACH, and REACH and 128


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {} if "gemma4" in request.param else {"head_dim": 32}
    model = tiny_model(request.param, max_position_embeddings=512, **sizes)
    return save(model, tmp_path_factory.mktemp("model"))


def opened(folder: Path, backend: str, num_blocks: int, **fields: object) -> ModelRunner:
    dtype = {"dtype": "float32"} if backend == "reference" else {}
    config = EngineConfig(model=str(folder), backend=backend, num_blocks=num_blocks, **dtype, **fields)
    return open_runner(config, [], lambda done, total: None)


def requests(lengths: Sequence[int], most: int) -> list[Request]:
    """Prompts of several chunks and short ones, that grow by `most` drawn tokens: the likeliest one of a tiny Gemma is
    always the one before.
    """
    return [
        Request(
            f"{n}",
            tuple((7 * i + n) % 128 for i in range(n)),
            SamplingParams(temperature=1.0, seed=n, max_tokens=most, ignore_eos=True),
        )
        for n in lengths
    ]


def answers(engine: Engine, lengths: Sequence[int] = ()) -> list[list[int]]:
    backend = engine._executor.info.backend
    asked = requests(lengths or LENGTHS[backend], MOST[backend])
    found = run_all(engine, *asked)
    engine.check()
    return [tokens_of(found[request.id]) for request in asked]


EACH_SIZE = pytest.mark.parametrize(("backend", "block_size"), [("cpu", 16), ("cpu", 128), ("reference", 16)])


@EACH_SIZE
def test_answers_are_those_of_layers_that_keep_all_tokens(folder, backend, block_size, monkeypatch):
    """Whole, in chunks, together, and found in the cache."""
    count = 4 * LENGTH // block_size + 4
    size = {"block_size": block_size}
    with monkeypatch.context() as patched:
        patched.setattr(loading, "reach_of", lambda spec: 0)
        whole = opened(folder, backend, count, **size)
    assert whole.info.num_window_blocks == 0
    want = [answer for n in LENGTHS[backend] for answer in answers(engine_over(whole), [n])]
    runner = opened(folder, backend, count, **size)
    assert (runner.info.num_window_blocks > 0, runner.info.reach) == (True, REACH)
    engine = engine_over(runner)
    assert answers(engine) == want
    assert answers(engine) == want, "cached"
    assert engine.stats().total_cached_tokens > 0
    chunks = engine_over(runner, max_batch=4, max_tokens_per_step=24, enable_prefix_cache=False)
    assert answers(chunks) == want


@EACH_SIZE
@pytest.mark.usefixtures("swaps_always")
@pytest.mark.parametrize("num_host_blocks", [0, 100], ids=["computed again", "swapped"])
def test_a_sequence_that_was_preempted_goes_on_alike(folder, backend, block_size, num_host_blocks):
    """The prompts fit, and no block more. Where every layer has a window, their blocks are enough for the answers."""
    size = {"block_size": block_size, "max_seq_len": LENGTH + 1}
    want = answers(engine_over(opened(folder, backend, 4 * LENGTH // block_size + 4, **size)))
    count = sum(-(-n // block_size) for n in LENGTHS[backend])
    runner = opened(folder, backend, count, max_batch=4, num_host_blocks=num_host_blocks, **size)
    engine = engine_over(runner, max_batch=4)
    assert answers(engine) == want
    stats = engine.stats()
    if stats.num_blocks == stats.num_window_blocks:
        assert stats.total_preemptions > 0
        assert (stats.total_swapped > 0) == (num_host_blocks > 0)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_prompt_is_found_by_its_last_window(folder, backend):
    engine = engine_over(opened(folder, backend, 100, max_batch=1))
    want = answers(engine, [300])
    assert engine.stats().total_cached_tokens == 0
    assert answers(engine, [300]) == want
    assert engine.stats().total_cached_tokens == 299


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_after_a_restart_a_window_comes_from_the_pool(folder, backend):
    """Where all layers have one, their blocks are those of the tier."""
    want = answers(engine_over(opened(folder, backend, 60)), [200])
    with running_agent(pool_bytes=64 << 20) as agent:
        tier = TierConfig("kvloom.rank.tier.ems:open_tier", 30.0, {"socket": str(agent.config.socket)}, is_watched=True)
        dtype = {"dtype": "float32"} if backend == "reference" else {}
        config = EngineConfig(model=str(folder), backend=backend, num_blocks=60, kv_tier=tier, **dtype)
        for is_warm in (False, True):
            with executor_of(config) as executor:
                engine = Engine(config, executor, ByteTokenizer())
                assert answers(engine, [200]) == want
                stats = engine.stats()
                assert (stats.total_tier_loaded_blocks > 0) == is_warm
                assert (stats.total_tier_loaded_windows > 0) == (
                    is_warm and engine._executor.info.num_window_blocks > 0
                )


def test_layers_that_others_with_all_tokens_read_keep_all(tmp_path):
    spec = open_checkpoint(save(tiny_model("gemma3"), tmp_path)).spec
    apart = windowed(spec)
    assert apart == {index for index, mixer in spec.attention if mixer.window is not None}
    assert 0 < len(apart) < spec.num_layers
    assert reach_of(spec) == REACH
    assert windowed(spec.served(WINDOW)) == frozenset(), "no sequence is longer than the window"
    assert windowed(spec.served(WINDOW + 1)) == apart


def test_a_model_without_windows_has_what_it_had(tmp_path):
    runner = opened(save(tiny_model("llama", head_dim=32), tmp_path), "cpu", 20)
    assert (runner.info.num_window_blocks, runner.info.reach, runner.window_layers) == (0, 0, [])
