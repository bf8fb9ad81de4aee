"""Models with a sliding window in every layer: blocks behind the window are freed, and answers stay the same."""

from pathlib import Path

import pytest

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.contract.config import EngineConfig
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.rank.loading import open_runner, reach_of
from kvloom.rank.runner import ModelRunner
from tests.support.engine.engines import engine_over, run_all, tokens_of
from tests.support.models.checkpoints import save, tiny_model

WINDOW, BLOCK = 7, 16
REACH = WINDOW + 127  # the kernels read keys in chunks of 128
LENGTH = 250


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("mistral, window of 7", head_dim=32), tmp_path_factory.mktemp("model"))


def opened(folder: Path, backend: str, num_blocks: int) -> ModelRunner:
    dtype = {"dtype": "float32"} if backend == "reference" else {}
    config = EngineConfig(model=str(folder), backend=backend, num_blocks=num_blocks, **dtype)
    return open_runner(config, [], lambda done, total: None)


def requests() -> list[Request]:
    """Prompts of several chunks and short ones. All grow to LENGTH tokens."""
    lengths = (3, 40, 180)
    return [
        Request(
            f"{n}", tuple((7 * i + n) % 128 for i in range(n)), SamplingParams(temperature=0, max_tokens=LENGTH - n)
        )
        for n in lengths
    ]


def answers(engine: Engine) -> list[list[int]]:
    found = run_all(engine, *requests())
    engine.check()
    return [tokens_of(found[request.id]) for request in requests()]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize(
    "fields", [{}, {"max_batch": 4, "max_tokens_per_step": 24, "enable_prefix_cache": False}], ids=["", "chunks"]
)
def test_three_sequences_fit_where_only_their_windows_do_and_answer_as_with_room_for_all(folder, backend, fields):
    wide, tight = opened(folder, backend, 60), opened(folder, backend, 31)
    assert wide.info.reach == tight.info.reach == REACH
    wide.info.reach = 0
    want = answers(engine_over(wide, **fields))
    engine = engine_over(tight, **fields)
    assert answers(engine) == want
    assert engine.stats().total_preemptions == 0, "their windows fit, whole sequences of 16 blocks would not"


@pytest.mark.parametrize("name", ["gemma3", "llama"])
def test_a_model_with_a_layer_that_sees_all_keeps_all(name, tmp_path):
    assert reach_of(open_checkpoint(save(tiny_model(name), tmp_path)).spec) == 0
