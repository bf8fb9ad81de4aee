"""Fixtures that many tests share; the order of the tests in a run; the settings of drawn examples."""

import functools
import gc
import logging
import os
import ssl
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from httpx import _config as httpx_config
from httpx._transports import default as httpx_transports
from hypothesis import Phase, settings

from kvloom.checkpoints.demo_models import pull
from tests.support import forks
from tests.support.models import kept_models
from tests.support.vllm.serving import OVER_VLLM

if TYPE_CHECKING:
    from tests.support.servers import FakeServer

os.environ["OMP_NUM_THREADS"] = "1"  # torch's, here and in processes that tests start: several of us share two cores

make_ssl_context = httpx_transports.create_ssl_context


@functools.cache
def ssl_context(where: tuple[str | None, ...], **options: Any) -> ssl.SSLContext:
    return make_ssl_context(**options)


def shared_ssl_context(**options: Any) -> ssl.SSLContext:
    """Cached: httpx would read all CA certificates again for each client, which costs more than a server's start."""
    return ssl_context((os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR")), **options)


httpx_transports.create_ssl_context = shared_ssl_context

# By default clients time out after five seconds; on a busy machine any answer may take that long.
vars(httpx_config.DEFAULT_TIMEOUT_CONFIG).update(connect=120.0, read=120.0, write=120.0, pool=120.0)

# Objects loaded during collection live to the end, so that collecting garbage is useless (see
# pytest_collection_finish).
gc.disable()

# On CI the drawn values are the same in every run, elsewhere new ones. `examples`: only written examples; `unshrunk`:
# the first failure is reported without shrinking.
drawn = settings(settings.get_profile("ci" if "CI" in os.environ else "default"), deadline=None)
settings.register_profile("kvloom", drawn)
settings.register_profile("examples", drawn, phases=[Phase.explicit])
settings.register_profile("unshrunk", drawn, phases=[Phase.explicit, Phase.generate], report_multiple_bugs=False)
settings.load_profile("kvloom")


# Folders whose files run in one process, because they share what is slow to start: Chromium; torch and diffusers; the
# real model, whose threads also run better alone.
TOGETHER = ("tests/browser", "tests/images", "tests/real")

# These start first, in this order: each takes six seconds or more, and none should run alone at the end. The first one
# compiles the kernels if they are not compiled yet; the five after it need none, or compile their own.
LONGEST = (
    "tests/real",
    "tests/fleet/test_serve.py",
    "tests/engine/kernels/test_cpu_native.py",
    "tests/engine/api/test_cpp.py",
    "tests/browser",
    "tests/pool/storage/test_native_pool.py",
    "tests/engine/kernels/test_cpu.py",
    "tests/engine/api/test_cpp_hosts.py",
    "tests/images",
    "tests/server/serving/test_pool_answers.py",
    "tests/server/run/test_walk.py",
    "tests/gewu/library/test_hostile_apps.py",
    "tests/engine/kernels/test_asked.py",
    "tests/pool/cluster/test_node_batches.py",
    "tests/engine/api/test_cpp_install.py",
    "tests/bench/test_soak.py",
    "tests/compat/test_mindieclient.py",
    "tests/engine/link/test_ranks.py",
    "tests/engine/rank/test_kvmemory.py",
    "tests/gewu/library/test_deadlines.py",
    "tests/gewu/library/test_abi.py",
    "tests/server/dialects/test_constraints.py",
    "tests/engine/link/test_hosted.py",
    "tests/gewu/test_daemon.py",
    "tests/test_wheel.py",
    "tests/pool/test_faults.py",
    "tests/gewu/test_neighbours.py",
    "tests/engine/kernels/test_channels.py",
    "tests/engine/kernels/test_lora.py",
    "tests/server/run/test_loading.py",
    "tests/tuning/test_guide.py",
    "tests/server/chat/test_tools.py",
    "tests/server/serving/test_ems_tier.py",
    "tests/wire/test_schema.py",
    "tests/engine/models/test_hub.py",
    "tests/server/run/test_main.py",
    "tests/engine/kernels/test_packed.py",
    "tests/engine/test_outage.py",
    "tests/engine/text/test_encoding.py",
    "tests/ems/integration/test_vllm.py",
    "tests/pool/cluster/test_distribution.py",
    "tests/wire/test_fuzz.py",
    "tests/server/http/test_keep_alive.py",
    "tests/pool/control/test_control.py",
    "tests/engine/kernels/test_experts.py",
    "tests/server/dialects/test_writers.py",
    "tests/pool/test_cli.py",
    "tests/engine/test_crashes.py",
    "tests/engine/test_thread.py",
    "tests/ems/test_examples.py",
    "tests/engine/rank/test_lora.py",
    "tests/engine/weights/test_experts.py",
    "tests/server/observe/test_tracing.py",
    "tests/routers/test_routers.py",
    "tests/pool/control/test_control_link.py",
    "tests/server/http/test_sites.py",
    "tests/pool/cluster/test_peer_tls.py",
    "tests/mindieclient/test_samples.py",
)


def together(nodeid: str) -> str:
    """The unit that runs in one process: the file of a test, or its folder."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder in TOGETHER else file


def pytest_configure(config: pytest.Config) -> None:
    """Let each of several processes begin collection at a different file, so that it finds files that others have
    already compiled (pytest rewrites the `assert` statements of each file)."""
    if (worker := getattr(config, "workerinput", None)) is not None and config.args == ["tests"]:
        files = sorted(str(path) for path in (config.rootpath / "tests").rglob("test_*.py"))
        begin = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
        config.args = files[begin:] + files[:begin]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    items.sort(key=lambda item: item.path)  # the same order in every process, before the shuffle
    yield
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(together(item.nodeid), len(rank)))
    for item in items if OVER_VLLM else ():
        if (mark := item.get_closest_marker("mock")) is not None:
            item.add_marker(pytest.mark.skip(reason=f"not over vLLM: {mark.args[0]}"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """pytest-xdist's scheduler by scope: workers take one file or folder after the other, in the order of the tests."""
    scheduler = import_module("xdist.scheduler").LoadScopeScheduling(config, log)
    scheduler._split_scope = together
    config.option.loadscopereorder = False
    return scheduler


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def forked_processes() -> Iterator[None]:
    """kvloom's processes are forked, see forks.py; tests of their start use `really_started`."""
    forks.install()
    yield
    forks.remove()
    forks.end()


@pytest.fixture
def really_started() -> Iterator[None]:
    """kvloom's processes are started as a user starts them: Python, then its imports."""
    forks.remove()
    yield
    forks.install()


@pytest.fixture(scope="module", autouse=True)
def log_as_it_was() -> Iterator[None]:
    """Restore the root logger after each file, whose tests may open the log as programs over the Engine API do."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    for opened in set(root.handlers).difference(handlers):
        opened.close()
    root.handlers[:] = handlers


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model, fetched once into the user's cache."""
    return pull("smollm2")


@pytest.fixture(scope="session")
def tiny_path(smollm2_path: Path) -> Path:
    """A tiny model with the demo model's tokenizer, see tiny_gguf.py."""
    return kept_models.tiny_gguf(smollm2_path)


@pytest.fixture(scope="session")
def tiny_pipeline() -> Path:
    """A folder of a random StableDiffusionPipeline that makes pictures of 64 x 64."""
    if find_spec("diffusers") is None:
        pytest.skip("needs diffusers: pip install 'kvloom[images]'")
    return kept_models.pipeline("StableDiffusionPipeline")


@pytest.fixture(scope="module")
def embedder(server: "FakeServer") -> Iterator["FakeServer"]:
    """A server that makes embeddings; vLLM makes them only when it was started with the pooling runner."""
    if not OVER_VLLM:
        yield server
        return
    with import_module("tests.support.servers").fake_server(plugin_options={"runner": "pooling"}) as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator["FakeServer"]:
    """A server on a free port over the fake model. It needs most modules, so they are imported when it is used."""
    with import_module("tests.support.servers").fake_server() as running:
        yield running
