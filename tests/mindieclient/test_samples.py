"""The samples of spec 4.4, run as they are, plain and over mutual TLS."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.net.devcerts import make_files
from kvloom.server.secure.tls import tls_context
from tests.support.wire.triton import FakeTriton, serving

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "examples/mindieclient"
LAST_LINES = {
    "infer": "output_data: [[15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0]]",
    "async_infer": "output_data: [[15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0]]",
    "generate": "'text_output': 'My name is Olivier and I!'",
    "generate_stream": "final generated text:  piece0 piece1",
    "status": "gets_slot_count: {'total_slots': 50, 'free_slots': 50}",
    "cancel": "Test cancel api succeed!",
}


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, SAMPLES / f"{name}.py", *arguments],
        capture_output=True, text=True, timeout=120, env={"PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("name", LAST_LINES)
def test_plain(name, url):
    assert LAST_LINES[name] in run(name, "-u", url)


@pytest.mark.parametrize("name", LAST_LINES)
def test_mutual_tls(name, tmp_path):
    context = tls_context(make_files(tmp_path))
    client = tmp_path / "client"
    with serving(FakeTriton().app(), ssl_context_factory=lambda config, default: context) as port:
        options = ["-ca", f"{client}/ca.pem", "-key", f"{client}/client.key.pem", "-cert", f"{client}/client.pem"]
        assert LAST_LINES[name] in run(name, "-u", f"https://127.0.0.1:{port}", "-s", *options)
