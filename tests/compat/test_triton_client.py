"""tritonclient[http], unmodified: its binary tensors, which are its default, and JSON; sync and asyncio."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.support.servers import MODEL, FakeServer, fake_server
from tests.support.waiting import until

pytestmark = pytest.mark.compat
IDS = [104, 101, 108, 108, 111]


@pytest.fixture(scope="module")
def client(server: FakeServer) -> Iterator[triton.InferenceServerClient]:
    client = triton.InferenceServerClient(server.url.removeprefix("http://"))
    yield client
    client.close()


def tensors(module: Any, is_binary: bool, datatype: str = "UINT32") -> list[Any]:
    dtype = {"UINT32": np.uint32, "INT64": np.int64}[datatype]
    tensor = module.InferInput("INPUT0", [1, len(IDS)], datatype)
    tensor.set_data_from_numpy(np.array([IDS], dtype=dtype), binary_data=is_binary)
    return [tensor]


def test_readiness_and_metadata(client: triton.InferenceServerClient, server: FakeServer):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready(MODEL)
    assert client.is_model_ready(MODEL, "1")
    assert not client.is_model_ready("other")
    assert not client.is_model_ready(MODEL, "2")
    assert client.get_server_metadata()["name"] == "MindIE Server"
    metadata = client.get_model_metadata(MODEL)
    assert (metadata["name"], metadata["versions"]) == (MODEL, ["1"])
    assert metadata["inputs"] == [{"name": "input0", "shape": [-1], "datatype": "UINT32"}]
    assert client.get_model_config(MODEL)["max_seq_len"] == server.engine.max_seq_len


def test_binary_and_json_tensors_give_the_same_tokens(client: triton.InferenceServerClient, server: FakeServer):
    prompt = bytes(IDS).decode()
    text = server.post("/generate", {"inputs": prompt, "parameters": {"max_new_tokens": 9}}).json()["generated_text"]
    answers = []
    for is_binary_in in (True, False):
        for outputs in (None, [triton.InferRequestedOutput("OUTPUT0", binary_data=False)]):
            inputs = tensors(triton, is_binary_in)
            result = client.infer(MODEL, inputs, outputs=outputs, request_id="a1", parameters={"max_new_tokens": 9})
            [output] = result.get_response()["outputs"]
            assert result.get_response()["id"] == "a1"
            assert (output["name"], output["datatype"]) == ("OUTPUT0" if outputs else "output0", "UINT32")
            assert ("data" in output) is (outputs is not None)
            array = result.as_numpy(output["name"])
            assert array.dtype == np.uint32
            assert array.shape == tuple(output["shape"]) == (1, 9)
            answers.append(array.tolist())
    assert answers == [[list(text.encode())]] * 4


def test_other_integer_types_and_compression(client: triton.InferenceServerClient):
    expected = client.infer(MODEL, tensors(triton, True)).as_numpy("output0")
    wide = client.infer(MODEL, tensors(triton, True, "INT64")).as_numpy("output0")
    versioned = client.infer(MODEL, tensors(triton, False), model_version="1").as_numpy("output0")
    assert expected.tolist() == wide.tolist() == versioned.tolist()


def test_async_infer_of_the_sync_client(client: triton.InferenceServerClient):
    expected = client.infer(MODEL, tensors(triton, True)).as_numpy("output0")
    result = client.async_infer(MODEL, tensors(triton, True)).get_result()
    assert result.as_numpy("output0").tolist() == expected.tolist()


def test_asyncio(server: FakeServer, client: triton.InferenceServerClient):
    async def ask() -> list[Any]:
        async with triton_aio.InferenceServerClient(server.url.removeprefix("http://")) as asynchronous:
            assert await asynchronous.is_server_ready()
            assert (await asynchronous.get_model_metadata(MODEL))["name"] == MODEL
            asked = [asynchronous.infer(MODEL, tensors(triton_aio, is_binary)) for is_binary in (True, False) * 4]
            return [result.as_numpy("output0").tolist() for result in await asyncio.gather(*asked)]

    expected = client.infer(MODEL, tensors(triton, True)).as_numpy("output0").tolist()
    assert asyncio.run(ask()) == [expected] * 8


@pytest.mark.mock("counts its steps and their time")
def test_statistics_count_what_ran():
    with fake_server(has_eos=False, step_s=0.001) as server:
        client = triton.InferenceServerClient(server.url.removeprefix("http://"))
        [none] = client.get_inference_statistics()["model_stats"]
        assert (none["name"], none["version"], none["last_inference"]) == (MODEL, "1", 0)
        assert (none["inference_count"], none["execution_count"], none["batch_stats"]) == (0, 0, [])
        for _ in range(3):
            client.infer(MODEL, tensors(triton, True), parameters={"max_new_tokens": 4})
        assert server.post("/v1/completions", {"model": MODEL, "prompt": [9999]}).status_code == 400
        until(lambda: server.engine.stats().num_running == 0)
        [one] = client.get_inference_statistics(MODEL)["model_stats"]
        assert client.get_inference_statistics(MODEL, "1")["model_stats"] == [one]
        stats = one["inference_stats"]
        assert one["inference_count"] == stats["success"]["count"] == stats["compute_infer"]["count"] == 3
        assert stats["queue"]["count"] == 3
        assert stats["fail"]["count"] == 1
        assert stats["success"]["ns"] >= stats["compute_infer"]["ns"] > 0
        assert one["execution_count"] == server.engine.stats().total_steps == 12
        assert [(batch["batch_size"], batch["compute_infer"]["count"]) for batch in one["batch_stats"]] == [(1, 12)]
        assert one["batch_stats"][0]["compute_infer"]["ns"] >= 12e6  # a step takes 1 ms
        assert one["last_inference"] > 1_700_000_000_000
        with pytest.raises(InferenceServerException, match="does not exist"):
            client.get_inference_statistics("other")
        with pytest.raises(InferenceServerException, match="no version"):
            client.get_inference_statistics(MODEL, "2")
        client.close()


def test_the_repository_is_listed_and_not_controlled(client: triton.InferenceServerClient, server: FakeServer):
    index = client.get_model_repository_index()
    assert index == [{"name": MODEL, "version": "1", "state": "READY", "reason": ""}]
    for call in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException, match="explicit model load / unload is not allowed"):
            call(MODEL)
        with pytest.raises(InferenceServerException, match="does not exist"):
            call("other")
    assert client.is_model_ready(MODEL)


def test_errors_become_the_clients_exception(client: triton.InferenceServerClient):
    with pytest.raises(InferenceServerException, match="temperature"):
        client.infer(MODEL, tensors(triton, True), parameters={"temperature": -1.0})
    with pytest.raises(InferenceServerException, match="does not exist"):
        client.infer("other", tensors(triton, True))
    floats = triton.InferInput("input0", [1, 2], "FP32")
    floats.set_data_from_numpy(np.zeros((1, 2), dtype=np.float32))
    with pytest.raises(InferenceServerException, match="datatype"):
        client.infer(MODEL, [floats])
    output = triton.InferRequestedOutput("output0")
    output.set_shared_memory("region", 400)
    with pytest.raises(InferenceServerException, match="shared_memory_region: is not supported"):
        client.infer(MODEL, tensors(triton, True), outputs=[output])


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
@pytest.mark.parametrize("is_binary", [True, False])
def test_packed_requests_are_those_that_are_not(client: triton.InferenceServerClient, algorithm: str, is_binary: bool):
    parameters = {"max_new_tokens": 5}
    plain = client.infer(MODEL, tensors(triton, is_binary), parameters=parameters)
    packed = client.infer(
        MODEL, tensors(triton, is_binary), parameters=parameters, request_compression_algorithm=algorithm
    )
    name = plain.get_response()["outputs"][0]["name"]
    assert packed.as_numpy(name).tolist() == plain.as_numpy(name).tolist()
