"""Fixtures that many tests share, and how the tests of a run are ordered and drawn."""

import gc
import os
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, settings

from kvloom.checkpoints.demo_models import pull
from tests.support.kept import kept

if TYPE_CHECKING:
    from tests.support.servers import FakeServer

os.environ["OMP_NUM_THREADS"] = "1"  # torch's, here and in processes that tests start: two of us share two cores

# All that is loaded to find the tests stays to the end: nothing of it is garbage (see pytest_collection_finish).
gc.disable()

# On CI the same values in every run, elsewhere new ones. `examples`: only those that somebody wrote down; `unshrunk`:
# the first failure is told as it is.
drawn = settings(settings.get_profile("ci" if "CI" in os.environ else "default"), deadline=None)
settings.register_profile("kvloom", drawn)
settings.register_profile("examples", drawn, phases=[Phase.explicit])
settings.register_profile("unshrunk", drawn, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
settings.load_profile("kvloom")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the real model come first: one process opens what they share, and none of the long ones is last."""
    items.sort(key=lambda item: item.get_closest_marker("real") is None)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model, fetched once into the user's cache."""
    return pull("smollm2")


@pytest.fixture(scope="session")
def tiny_path(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the demo model's tokens that costs next to nothing, see tiny_gguf.py."""
    path: Path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return import_module("tests.support.tiny_gguf").make_tiny_gguf(smollm2_path, path)


@pytest.fixture(scope="session")
def tiny_pipeline() -> Path:
    """A folder of a random StableDiffusionPipeline that makes pictures of 64 x 64."""
    if find_spec("diffusers") is None:
        pytest.skip("needs diffusers: pip install 'kvloom[images]'")
    source = Path(__file__).parent / "support" / "pipelines.py"
    versions = (version(name).encode() for name in ("diffusers", "transformers"))
    return kept([source.read_bytes(), *versions], "made", _make_pipeline) / "pipeline"


def _make_pipeline(folder: Path) -> None:
    import_module("tests.support.pipelines").stable_diffusion(folder)


@pytest.fixture(scope="module")
def server() -> Iterator["FakeServer"]:
    """A server on a free port over the fake model. It is most of our modules: they are loaded when it is asked for."""
    with import_module("tests.support.servers").fake_server() as running:
        yield running
