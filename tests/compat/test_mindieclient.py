"""The samples of spec 4.4, against this server: plain, over mutual TLS, and with gevent's patches."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.net.devcerts import make_files
from kvloom.server.secure.tls import tls_context
from tests.support.servers import OVER_VLLM, FakeServer, fake_server

pytestmark = pytest.mark.compat

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "examples/mindieclient"
STEP_S = 0.02  # so that a stream still runs when its client cancels it
LAST_LINES = {
    "infer": "output_data: [[",
    "async_infer": "output_data: [[",
    "generate": "'text_output': '",
    "generate_stream": "final generated text: ",
    "status": "gets_slot_count: {'total_slots': 64, 'free_slots': 64",
    "cancel": "Test cancel api succeed!",
}
if OVER_VLLM:  # the other samples ask for a watermark and typical sampling, which vLLM does not support
    LAST_LINES = {name: line for name, line in LAST_LINES.items() if name in ("infer", "async_infer", "status")}


@pytest.fixture(scope="module")
def plain() -> Iterator[FakeServer]:
    with fake_server(names=("llama_65b",), step_s=STEP_S, has_eos=False) as server:
        yield server


@pytest.fixture(scope="module")
def client_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    make_files(folder)
    return folder


@pytest.fixture(scope="module")
def secure(client_files: Path) -> Iterator[FakeServer]:
    context = tls_context(make_files(client_files))
    with fake_server(names=("llama_65b",), step_s=STEP_S, has_eos=False, tls=context) as server:
        yield server


def run(name: str, *arguments: str, before: str = "pass") -> str:
    code = f"{before}; import runpy, sys; sys.argv[0] = {name!r}; runpy.run_path({str(SAMPLES / name)!r} + '.py', "
    code += "run_name='__main__')"
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{SAMPLES}"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("name", LAST_LINES)
def test_plain(plain: FakeServer, name: str):
    assert LAST_LINES[name] in run(name, "-u", plain.url)


@pytest.mark.parametrize("name", LAST_LINES)
def test_mutual_tls(secure: FakeServer, client_files: Path, name: str):
    client = client_files / "client"
    options = ["-ca", f"{client}/ca.pem", "-key", f"{client}/client.key.pem", "-cert", f"{client}/client.pem"]
    assert LAST_LINES[name] in run(name, "-u", secure.url, "-s", *options)


@pytest.mark.parametrize("name", [name for name in ("async_infer", "generate_stream", "cancel") if name in LAST_LINES])
def test_when_gevent_has_patched_everything(plain: FakeServer, name: str):
    pytest.importorskip("gevent")
    before = "from gevent import monkey; monkey.patch_all()"
    assert LAST_LINES[name] in run(name, "-u", plain.url, before=before)
