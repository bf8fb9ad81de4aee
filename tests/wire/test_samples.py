"""The requests of spec 2.4 and 3.3.2, verbatim, and the meaning of their answers."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.servers import FakeServer, fake_server

MODEL = "llama_65b"
SAMPLED = """"do_sample": true, "max_new_tokens": 20, "repetition_penalty": 1.03, "return_full_text": false,
    "seed": null, "temperature": 0.5, "top_k": 10, "top_p": 0.95, "truncate": null"""
PREFILL = '"decoder_input_details": true, "details": true'
TGI = f'{{"inputs": "My name is Olivier and I", "parameters": {{{PREFILL}, {SAMPLED}}}}}'
TGI_COMPAT = f'{{"inputs": "My name is Olivier and I", "parameters": {{{PREFILL}, {SAMPLED}}}, "stream": false}}'
TGI_STREAM = f'{{"inputs": "My name is Olivier and I", "parameters": {{"details": true, {SAMPLED}}}}}'
VLLM = """{"prompt": "My name is Olivier and I", "stream": true, "repetition_penalty": 1.0, "top_p": 1.0, "top_k": 10,
    "max_tokens": 16, "temperature": 1.0}"""
CHAT = """{"model": "gpt-3.5-turbo", "messages": [
     {"role": "system", "content": "You are a student who is good at math."},
     {"role": "user", "content": "what is your hobby?"}],
    "max_tokens": 20, "presence_penalty": 1.03, "frequency_penalty": 1.0, "seed": null, "temperature": 0.5,
    "top_p": 0.95, "stream": false}"""
INFER = """{"id": "42", "inputs": [{"name": "input0", "shape": [1, 10], "datatype": "UINT32",
    "data": [396, 319, 13996, 29877, 29901, 29907, 3333, 20718, 316, 23924],
    "parameters": {"temperature": 0.5, "top_k": 10, "top_p": 0.95, "do_sample": true, "seed": null,
      "repetition_penalty": 1.03, "max_new_tokens": 512}}],
    "outputs": [{"name": "output0"}]}"""
TRITON = """{"id":"a123", "text_input": "My name is Olivier and I", "parameters": {"details": true, "do_sample": true,
    "max_new_tokens":200, "repetition_penalty": 1.1, "seed": 123, "temperature": 1, "top_k": 2147483647,
    "top_p": 0.99, "batch_size":100}}"""
NATIVE = """{"inputs": "My name is Olivier and I", "stream": true, "parameters": {"temperature": 0.5, "top_k": 10,
    "top_p": 0.95, "do_sample": true, "seed": null, "repetition_penalty": 1.03, "details": true}}"""


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """A server with the limits of the specification's example; its model answers under any name."""
    with fake_server(names=(MODEL,), max_iter_times=512, has_eos=False) as opened:
        yield opened


def post(server: FakeServer, path: str, body: str) -> str:
    response = server.client.post(path, content=body, headers={"Content-type": "application/json"})
    assert response.status_code == 200, response.text
    return response.text


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data:").strip() for line in text.split("\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def test_what_is_asked_without_a_body(server: FakeServer):
    for path in ("/health", "/v2/health/live", "/v2/health/ready", f"/v2/models/{MODEL}/ready"):
        answer = server.client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")

    def get(path: str) -> Any:
        return server.client.get(path).json()

    info = get("/info")
    assert info["models"][0]["model_id"] == MODEL
    assert info["models"][0]["max_total_tokens"] == info["max_input_length"] + 512 == server.engine.max_seq_len
    [card] = get("/v1/models")["data"]
    assert get(f"/v1/models/{MODEL}") == card
    assert (card["id"], card["object"]) == (MODEL, "model")
    assert get("/v2")["extensions"]["max_iter_times"] == 512
    assert get(f"/v2/models/{MODEL}")["inputs"] == [{"name": "input0", "shape": [-1], "datatype": "UINT32"}]
    config = get(f"/v2/models/{MODEL}/config")
    assert (config["model_name"], config["input_datatype"]) == (MODEL, "INT64")
    slots = get(f"/v2/models/{MODEL}/getSlotCount")
    assert slots["free_slots"] == slots["total_slots"] > 0


def test_tgi(server: FakeServer):
    for path, body in (("/", TGI_COMPAT), ("/generate", TGI)):
        answer = json.loads(post(server, path, body))
        [answer] = answer if path == "/" else [answer]
        details = answer["details"]
        assert (details["finish_reason"], details["generated_tokens"]) == ("length", 20)
        assert isinstance(details["seed"], int)
        assert "".join(token["text"] for token in details["prefill"]) == "My name is Olivier and I"
        assert "".join(token["text"] for token in details["tokens"]) == answer["generated_text"]


def test_tgi_stream(server: FakeServer):
    for path, body in (("/", TGI_STREAM[:-1] + ', "stream": true}'), ("/generate_stream", TGI_STREAM)):
        *tokens, last = events(post(server, path, body))
        assert len(tokens) == 19
        assert all(event["generated_text"] is event["details"] is None for event in tokens)
        assert last["generated_text"] == "".join(event["token"]["text"] for event in [*tokens, last])
        assert last["details"]["finish_reason"] == "length"


def test_vllm(server: FakeServer):
    frames = post(server, "/generate", VLLM).split("\0")
    assert frames.pop() == ""
    assert 8 < len(frames) <= 16  # a token without text makes no frame
    assert all(len(json.loads(frame)["text"][0]) <= 1 for frame in frames)
    whole = post(server, "/generate", VLLM.replace("true", "false"))
    assert json.loads(whole)["text"][0].startswith("My name is Olivier and I")


def test_openai(server: FakeServer):
    answer = json.loads(post(server, "/v1/chat/completions", CHAT))
    assert (answer["object"], answer["model"]) == ("chat.completion", MODEL)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 20
    stream = post(server, "/v1/chat/completions", CHAT.replace("false", "true"))
    assert stream.endswith("data: [DONE]\n\n")
    first, *_, last = events(stream)
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")


def test_triton(server: FakeServer):
    base = f"/v2/models/{MODEL}"
    answer = json.loads(post(server, base + "/generate", TRITON))
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("a123", MODEL, None)
    assert (answer["details"]["finish_reason"], answer["details"]["generated_tokens"]) == ("length", 200)
    stream = post(server, base + "/generate_stream", TRITON)
    assert all(line.startswith("data:{") for line in stream.split("\n") if line)
    pieces = events(stream)
    assert "".join(event["text_output"] for event in pieces) == answer["text_output"]
    assert [event["details"]["generated_tokens"] for event in pieces] == list(range(1, 201))


def test_native(server: FakeServer):
    *tokens, last = events(post(server, "/infer", NATIVE))
    assert all(event["tokens"] == event["token"] for event in [*tokens, last])
    assert last["tokens"]["text"] is None
    assert last["generated_text"].startswith("".join(event["tokens"]["text"] for event in tokens))
    assert last["details"]["generated_tokens"] == 20
    whole = json.loads(post(server, "/infer", NATIVE.replace('"stream": true', '"stream": false')))
    assert whole["details"].keys() == {"finish_reason", "generated_tokens", "seed"}


def test_infer(server: FakeServer):
    """The sample's ids belong to a vocabulary of 32000; they are mapped into the fake model's 258."""
    refused = server.client.post(f"/v2/models/{MODEL}/infer", content=INFER)
    assert refused.status_code == 422
    assert "vocabulary" in refused.json()["error"]
    body = json.loads(INFER)
    body["inputs"][0]["data"] = [id % 256 for id in body["inputs"][0]["data"]]
    answer = server.post(f"/v2/models/{MODEL}/infer", body).json()
    [output] = answer["outputs"]
    assert (answer["id"], output["name"], output["shape"], output["datatype"]) == ("42", "output0", [1, 512], "UINT32")
    assert len(output["data"]) == 512
