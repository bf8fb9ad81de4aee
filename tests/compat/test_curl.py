"""The curl commands of spec 2.4, verbatim except for the port, in a folder that holds the client's certificate."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.net.devcerts import make_files
from kvloom.server.secure.tls import tls_context
from tests.support.servers import FakeServer, fake_server

pytestmark = pytest.mark.compat

HEAD = """curl -H "Accept: application/json" -H "Content-type: application/json" --cacert ca.pem --cert client.pem
--key client.key.pem"""
PARAMETERS = """
  "inputs": "My name is Olivier and I",
  "parameters": {
    "decoder_input_details": true,
    "details": true,
    "do_sample": true,
    "max_new_tokens": 20,
    "repetition_penalty": 1.03,
    "return_full_text": false,
    "seed": null,
    "temperature": 0.5,
    "top_k": 10,
    "top_p": 0.95,
    "truncate": null
   }
}"""
PROMPT = """
    "prompt": "My name is Olivier and I",
    "max_tokens": 20,
    "repetition_penalty": 1.03,
    "presence_penalty": 1.2,
    "frequency_penalty": 1.2,
    "temperature": 0.5,
    "top_k": 10,
    "top_p": 0.95,
    "stream": false
}"""
CHAT = """
 "model": "gpt-3.5-turbo",
 "messages": [{
  "role": "system",
  "content": "You are a student who is good at math."
    },
    {
     "role": "user",
     "content": "what is your hobby?"
    }
],
 "max_tokens": 20,
 "presence_penalty": 1.03,
 "frequency_penalty": 1.0,
 "seed": null,
 "temperature": 0.5,
 "top_p": 0.95,
 "stream": false
}"""
TENSOR = """
 "id": "42",
 "inputs": [{
  "name": "input0",
  "shape": [
   1,
   10
  ],
  "datatype": "UINT32",
  "data": [
   96, 31, 139, 29, 29, 29, 33, 20, 31, 23
  ],
  "parameters": {
   "temperature": 0.5,
   "top_k": 10,
   "top_p": 0.95,
   "do_sample": true,
   "seed": null,
   "repetition_penalty": 1.03,
   "max_new_tokens": 512
  }
 }],
 "outputs": [{
  "name": "output0"
 }]
}"""
TEXT = """
  "id":"a123",
  "text_input": "My name is Olivier and I",
  "parameters": {
    "details": true,
    "do_sample": true,
    "max_new_tokens":200,
    "repetition_penalty": 1.1,
    "seed": 123,
    "temperature": 1,
    "top_k": 2147483647,
    "top_p": 0.99,
    "batch_size":100
  }
}"""
INFER = """
 "inputs": "My name is Olivier and I",
 "stream": true,
 "parameters": {
  "temperature": 0.5,
  "top_k": 10,
  "top_p": 0.95,
  "do_sample": true,
  "seed": null,
  "repetition_penalty": 1.03,
  "details": true
 }
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[FakeServer]:
    """A TLS server for the samples. The mock's token ids end at 257, so the samples' larger ids are replaced."""
    context = tls_context(make_files(folder))
    with fake_server(names=("llama_65b",), tls=context, max_iter_times=512) as running:
        yield running


def curl(server: FakeServer, folder: Path, rest: str) -> str:
    port = server.url.rsplit(":", 1)[1]
    line = " ".join(HEAD.split("\n")) + " -sS " + rest.replace("127.0.0.1:1025", f"127.0.0.1:{port}")
    done = subprocess.run(["bash", "-c", line], cwd=folder / "client", capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def events(text: str, mark: str = "data: ") -> list[dict[str, object]]:
    return [json.loads(line.removeprefix(mark)) for line in text.splitlines() if line]


def test_models(server: FakeServer, folder: Path):
    answer = json.loads(curl(server, folder, "-X GET https://127.0.0.1:1025/v1/models"))
    assert [card["id"] for card in answer["data"]] == ["llama_65b"]


def test_tgi(server: FakeServer, folder: Path):
    answer = json.loads(curl(server, folder, f"-X POST -d '{{{PARAMETERS}' https://127.0.0.1:1025/generate"))
    assert "".join(token["text"] for token in answer["details"]["tokens"]) == answer["generated_text"]
    assert "".join(token["text"] for token in answer["details"]["prefill"]) == "My name is Olivier and I"
    stream = events(curl(server, folder, f"-X POST -d '{{{PARAMETERS}' https://127.0.0.1:1025/generate_stream"))
    assert "".join(event["token"]["text"] for event in stream) == stream[-1]["generated_text"]
    assert stream[-1]["details"]["generated_tokens"] == len(stream)


def test_vllm(server: FakeServer, folder: Path):
    answer = json.loads(curl(server, folder, f"-X POST -d '{{{PROMPT}' https://127.0.0.1:1025/generate"))
    assert answer["text"][0].startswith("My name is Olivier and I")


def test_openai(server: FakeServer, folder: Path):
    answer = json.loads(curl(server, folder, f"-X POST -d '{{{CHAT}' https://127.0.0.1:1025/v1/chat/completions"))
    assert (answer["object"], answer["model"]) == ("chat.completion", "llama_65b")
    assert answer["usage"]["completion_tokens"] <= 20


def test_triton(server: FakeServer, folder: Path):
    base = "https://127.0.0.1:1025/v2/models/llama_65b"
    answer = json.loads(curl(server, folder, f"-X POST -d '{{{TENSOR}' {base}/infer"))
    [output] = answer["outputs"]
    assert (answer["id"], output["name"], output["shape"]) == ("42", "output0", [1, len(output["data"])])
    whole = json.loads(curl(server, folder, f"-X POST -d '{{{TEXT}' {base}/generate"))
    stream = events(curl(server, folder, f"-X POST -d '{{{TEXT}' {base}/generate_stream"), "data:")
    assert "".join(str(event["text_output"]) for event in stream) == whole["text_output"]  # same seed, 123
    assert stream[-1]["details"]["finish_reason"] == whole["details"]["finish_reason"]


def test_native(server: FakeServer, folder: Path):
    stream = events(curl(server, folder, f"-X POST -d '{{{INFER}' https://127.0.0.1:1025/infer"))
    assert all(event["token"] == event["tokens"] for event in stream)
    assert stream[-1]["details"]["generated_tokens"] == len(stream)
    assert str(stream[-1]["generated_text"]).startswith("".join(str(e["token"]["text"]) for e in stream[:-1]))


def test_without_a_client_certificate_curl_is_refused(
    server: FakeServer, folder: Path, caplog: pytest.LogCaptureFixture
):
    line = f"curl -sS --cacert ca.pem {server.url}/v1/models"
    done = subprocess.run(["bash", "-c", line], cwd=folder / "client", capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert done.stdout == ""
    assert "TLS handshake refused: PEER_DID_NOT_RETURN_A_CERTIFICATE" in caplog.text
