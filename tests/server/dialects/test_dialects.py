"""The TGI, vLLM, Triton and native routes: refusals and their messages, and the effect of options."""

import json
import struct
import threading
from typing import Any

import httpx
import pytest

from kvloom.server.secure.api_keys import new_key
from kvloom.server.serving.options import WireOptions
from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until


@pytest.fixture(scope="module")
def limited():
    """A server with maxSeqLen 200 and maxIterTimes 100: prompts have at most 100 tokens."""
    with fake_server(max_seq_len=200, max_iter_times=100) as server:
        yield server


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"temperature": 0}, "`temperature` must be strictly positive"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
        ({"temperature": 100.5}, "`temperature` must be <= 100"),
        ({"repetition_penalty": 101}, "`repetition_penalty` must be <= 100"),
        ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"truncate": 0}, "`truncate` must be strictly positive and less than 100. Given: 0"),
        ({"truncate": 101}, "`truncate` must be strictly positive and less than 100. Given: 101"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"max_new_tokens": 101}, "`max_new_tokens` must be <= 100. Given: 101"),
        ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ({"best_of": 2, "do_sample": True, "seed": 1}, "`seed` must not be set when `best_of` > 1"),
        ({"seed": 2**64}, "`seed` must be between 0 and 18446744073709551615"),
    ],
)
def test_tgi_refuses_in_its_own_words(limited: FakeServer, parameters: dict[str, Any], text: str):
    response = limited.post("/generate", {"inputs": "hi", "parameters": parameters})
    assert (response.status_code, response.json()) == (
        422,
        {"error": f"Input validation error: {text}", "error_type": "validation"},
    )


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
def test_a_batch_size_is_a_hint_that_is_checked(limited: FakeServer, route: str):
    statuses = {}
    for size in (0, 1, 100):
        body = {"text_input": "hi", "parameters": {"max_new_tokens": 2, "batch_size": size}}
        answer = limited.post(f"/v2/models/{MODEL}/{route}", body)
        statuses[size] = (answer.status_code, "`batch_size` must be strictly positive" in answer.text)
    assert statuses == {0: (422, True), 1: (200, False), 100: (200, False)}


def test_a_greedy_answer_has_no_seed_of_its_own_and_a_drawn_one_is_told(server: FakeServer):
    asked = {"max_new_tokens": 2, "details": True}
    for path in ("/generate", "/infer"):
        told = [
            server.post(path, {"inputs": "hi", "parameters": asked | more}).json()["details"]["seed"]
            for more in ({"seed": 5}, {"seed": 5, "do_sample": True}, {"do_sample": True})
        ]
        assert told[:2] == [5 if path == "/infer" else None, 5], "/infer tells what was sent"
        assert isinstance(told[2], int)


def test_prompts_are_bounded_by_characters_and_tokens(limited: FakeServer):
    for inputs, text in (
        ("", "`inputs` cannot be empty"),
        ("x" * 101, "`inputs` must have less than 101 tokens. Given: at least 101"),
        ("x" * 16001, "`inputs` must have at most 16000 characters. Given: 16001"),
    ):
        for path in ("/", "/generate", "/generate_stream", "/infer"):
            response = limited.post(path, {"inputs": inputs})
            assert response.json()["error"] == f"Input validation error: {text}"
    assert limited.post("/generate", {"inputs": "x" * 500, "parameters": {"truncate": 100}}).status_code == 200


@pytest.mark.parametrize(
    ("path", "name"),
    [("/generate", "inputs"), ("/infer", "inputs"), (f"/v2/models/{MODEL}/generate", "text_input")],
)
def test_a_length_has_its_other_name_too(server: FakeServer, path: str, name: str):
    for lengths, count in (({"max_tokens": 3}, 3), ({"max_tokens": 3, "max_new_tokens": 2}, 2), ({}, 20)):
        body = {name: "hi", "parameters": {"details": True, **lengths}}
        assert server.post(path, body).json()["details"]["generated_tokens"] == count
    refused = server.post(path, {name: "hi", "parameters": {"max_tokens": 0}}).json()["error"]
    assert refused == "Input validation error: `max_new_tokens` must be strictly positive"


def test_truncate_keeps_the_last_tokens(server: FakeServer):
    parameters = {"truncate": 3, "decoder_input_details": True, "max_new_tokens": 1}
    [answer] = server.post("/", {"inputs": "abcdef", "parameters": parameters}).json()
    assert [token["text"] for token in answer["details"]["prefill"]] == ["d", "e", "f"]


def test_best_of_gives_the_likeliest_first_and_the_others_beside_it(server: FakeServer):
    parameters = {"best_of": 3, "do_sample": True, "details": True, "max_new_tokens": 4}
    answer = server.post("/generate", {"inputs": "hi", "parameters": parameters}).json()
    assert len(answer["details"]["best_of_sequences"]) == 2
    refused = server.post("/generate_stream", {"inputs": "hi", "parameters": parameters})
    assert refused.json()["error"] == "Input validation error: `best_of` != 1 is not allowed for this endpoint"


def test_a_whole_answer_tells_its_times(server: FakeServer):
    headers = server.post("/generate", {"inputs": "hello"}).headers
    assert headers["x-compute-type"] == "1-cpu"
    assert headers["x-compute-characters"] == "5"
    assert {"x-total-time", "x-queue-time", "x-inference-time", "x-time-per-token"} <= headers.keys()


def test_options_change_what_the_wire_carries():
    options = WireOptions(is_full_text=True, is_root_object=True, is_input_echoed=True, has_oip_health=True)
    with fake_server(options=options) as server:
        assert "generated_text" in server.post("/", {"inputs": "hi"}).json()
        frames = server.post("/generate", {"prompt": "hi", "max_tokens": 3, "stream": True}).content.split(b"\0")[:-1]
        texts = [json.loads(frame)["text"][0] for frame in frames]
        assert all(text.startswith("hi") for text in texts)
        assert texts == sorted(texts, key=len)
        tensor = {"name": "x", "shape": [2], "datatype": "UINT32", "data": [104, 105]}
        answer = server.post(f"/v2/models/{MODEL}/infer", {"inputs": [tensor]}).json()
        assert answer["outputs"][0]["data"][:2] == [104, 105]
        assert server.client.get("/v2/health/ready").json() == {"ready": True}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"top_k": 0}, "top_k: must be -1 (all) or at least 1, got 0"),
        ({"use_beam_search": True}, "temperature: must be 0 when using beam search"),
        ({"length_penalty": 2.0}, "length_penalty: needs use_beam_search: true"),
        ({"surprise": 1}, "contains unknown field `surprise`"),
        ({"max_tokens": 0}, "max_tokens: must be between 1 and"),
        ({"n": 3, "best_of": 2}, "best_of: must be at least 3"),
    ],
)
def test_vllm_refuses_what_it_cannot_do(server: FakeServer, change: dict[str, Any], words: str):
    response = server.post("/generate", {"prompt": "hi", **change})
    assert response.status_code == 422
    assert words in response.json()["error"]


def infer_body(**changes: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "i", "shape": [1, 3], "datatype": "UINT32", "data": [1, 2, 3], **changes}]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": [1, 4]}, "inputs[0].shape: must be [1, 3], as the data, got [1, 4]"),
        ({"datatype": "FP32"}, "inputs[0].datatype: must be one of UINT32, INT32, UINT64, INT64, got 'FP32'"),
        ({"data": [1, 2, "3"]}, "inputs[0].data: must hold whole numbers"),
        ({"data": [1, 2, 300]}, "token id 300 is outside the vocabulary of 258"),
        ({"data": [1, 2, -1]}, "token id -1 is outside the vocabulary"),
        ({"data": None}, "inputs[0].data: is required"),
        ({"name": ""}, "inputs[0].name: must have 1 to 256 characters"),
        ({"parameters": {"temperature": "hot"}}, "parameters: expected `float | null`, got `str` at `temperature`"),
        ({"parameters": {"max_new_tokens": 0}}, "`max_new_tokens` must be strictly positive"),
        ({"parameters": {"binary_data_size": 12}}, "inputs[0].parameters.binary_data_size: must be the 0 bytes"),
        ({"parameters": {"shared_memory_region": "r"}}, "inputs[0].parameters.shared_memory_region: is not supported"),
    ],
)
def test_an_infer_tensor_that_is_wrong_is_named(server: FakeServer, changes: dict[str, Any], words: str):
    response = server.post(f"/v2/models/{MODEL}/infer", infer_body(**changes))
    assert response.status_code == 422
    assert words.lower() in response.json()["error"].lower()


@pytest.mark.parametrize("parameters", [{"shared_memory_region": "r"}, {"classification": 3}])
def test_an_output_that_cannot_be_had_is_refused_and_not_sent_otherwise(server: FakeServer, parameters: dict[str, Any]):
    body = {**infer_body(), "outputs": [{"name": "o", "parameters": parameters}]}
    response = server.post(f"/v2/models/{MODEL}/infer", body)
    assert response.status_code == 422
    assert f"outputs[0].parameters.{next(iter(parameters))}: is not supported" in response.json()["error"]


def test_a_binary_tensor_is_the_same_request(server: FakeServer):
    parameters = {"max_new_tokens": 5}
    plain = server.post(f"/v2/models/{MODEL}/infer", infer_body(data=[[1, 2, 3]], parameters=parameters)).json()
    for letter, datatype in (("I", "UINT32"), ("i", "INT32"), ("q", "INT64"), ("Q", "UINT64")):
        raw = struct.pack(f"<3{letter}", 1, 2, 3)
        tensor = {"name": "i", "shape": [3], "datatype": datatype, "parameters": {"binary_data_size": len(raw)}}
        body = {"inputs": [tensor], "parameters": {"binary_data_output": True, "max_new_tokens": 5}}
        head = json.dumps(body).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        response = server.client.post(f"/v2/models/{MODEL}/infer", content=head + raw, headers=headers)
        length = int(response.headers["inference-header-content-length"])
        output = json.loads(response.content[:length])["outputs"][0]
        assert output["parameters"]["binary_data_size"] == 20
        assert list(struct.unpack("<5I", response.content[length:])) == plain["outputs"][0]["data"]
    headers = {"Inference-Header-Content-Length": "99999"}
    response = server.client.post(f"/v2/models/{MODEL}/infer", content=b"{}", headers=headers)
    assert "must be at most 2, the body's length" in response.json()["error"]


def test_stop_infer_ends_every_request_of_the_id_and_one_that_waits():
    with fake_server(max_link_num=1, step_s=0.005) as server:
        path = f"/v2/models/{MODEL}"
        body = {"id": "a1", "text_input": "hi", "parameters": {"max_new_tokens": 1500, "seed": 3, "details": True}}
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(httpx.post(server.url + path + "/generate", json=body, timeout=120))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        until(lambda: server.admission.num_active == 2 and server.engine.stats().num_running == 1)
        slots = server.client.get(path + "/getSlotCount").json()
        assert slots["free_slots"] == slots["total_slots"] - 1
        assert server.post(path + "/stopInfer", {"id": "a1"}).json() == {"id": "a1"}
        for thread in threads:
            thread.join()
        assert [answer.json()["details"]["finish_reason"] for answer in answers] == ["stop_sequence"] * 2
        until(lambda: server.client.get(path + "/getSlotCount").json()["free_slots"] == slots["total_slots"])
        gone = server.post(path + "/stopInfer", {"id": "a1"})
        assert (gone.status_code, gone.json()["error"]) == (404, "RequestId is a1 not found.")
        assert server.post(path + "/stopInfer", {"id": "a b"}).status_code == 422


def test_ready_is_503_while_the_queue_is_full_and_live_is_not():
    with fake_server(max_link_num=1, step_s=0.005) as server:
        body = {"inputs": "hi", "parameters": {"max_new_tokens": 60, "seed": 3}}

        def ask() -> None:
            httpx.post(server.url + "/generate", json=body)

        threads = [threading.Thread(target=ask) for _ in range(3)]
        for thread in threads:
            thread.start()
        until(lambda: server.admission.num_active == 3)
        busy = server.client.get("/v2/health/ready")
        assert busy.status_code == 503
        assert busy.json() == {"message": "Service is alive but busy. Consider reducing request frequency"}
        assert server.client.get("/v2/health/live").status_code == 200
        refused = server.post("/generate", body)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error_type"] == "overloaded"
        for thread in threads:
            thread.join()
        assert server.client.get("/v2/health/ready").status_code == 200


def test_the_description_names_every_route_and_its_fields(server: FakeServer):
    paths = server.client.get("/openapi.json").json()["paths"]
    body = paths["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert [one["$ref"].rsplit("/")[-1] for one in body["anyOf"]] == ["GenerateBody", "PromptBody"]
    assert {"/v1/chat/completions", "/v2/models/{model}/infer", "/infer", "/docs"} <= paths.keys()
    assert "<title>kvloom: routes</title>" in server.client.get("/docs").text


@pytest.mark.mock("vLLM decides by itself who is next")
def test_the_holder_of_an_api_key_is_the_tenant_of_its_requests():
    """Under fair shares, the second request of one key waits behind the first request of another key."""
    keys = [new_key(), new_key()]
    with fake_server(max_batch=1, fair_token_s=1.0, step_s=0.01, keys=keys, has_eos=False) as server:
        ended: list[str] = []

        def ask(name: str, key: str) -> None:
            body = {"inputs": "hi", "parameters": {"max_new_tokens": 100}}
            headers = {"Authorization": f"Bearer {key}"}
            assert httpx.post(server.url + "/generate", json=body, headers=headers, timeout=120).status_code == 200
            ended.append(name)

        threads = []
        for number, (name, key) in enumerate((("a1", keys[0]), ("a2", keys[0]), ("b1", keys[1]))):
            threads.append(threading.Thread(target=ask, args=(name, key)))
            threads[-1].start()
            until(lambda number=number: server.admission.num_active == number + 1)
        for thread in threads:
            thread.join()
        assert ended == ["a1", "b1", "a2"]
