"""Items of an input that are only named by the id that the store gave them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import ByteTokenizer, fake_answer
from kvloom.server.keeping.store import ResponseStore
from tests.support.servers import MODEL, FakeServer, fake_server

PATH = "/v1/responses"
GREEDY = {"model": MODEL, "temperature": 0, "ignore_eos": True, "max_output_tokens": 8}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResponseStore]:
    store = ResponseStore(tmp_path_factory.mktemp("store") / "responses.db")
    yield store
    store.close()


@pytest.fixture(scope="module")
def keeping(store: ResponseStore) -> Iterator[FakeServer]:
    with fake_server(store=store) as server:
        yield server


def truth(*messages: tuple[str, str], count: int = 8) -> str:
    tokenizer = ByteTokenizer()
    prompt = tokenizer.apply_chat_template([{"role": role, "content": text} for role, text in messages])
    return tokenizer.decode(fake_answer(tokenizer.encode(prompt), SamplingParams(temperature=0), 0, count))


def respond(server: FakeServer, input: Any, **fields: Any) -> Any:
    response = server.post(PATH, {**GREEDY, "input": input, **fields})
    assert response.status_code == 200, response.text
    if not fields.get("stream"):
        return response.json()
    return json.loads(response.text.split("\n\n")[-2].split("\ndata: ")[1])["response"]


def text_of(response: Any) -> str:
    return response["output"][0]["content"][0]["text"]


def refusal(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


@pytest.mark.parametrize("stream", [False, True])
def test_an_item_is_named_by_its_id(keeping: FakeServer, stream: bool):
    first = respond(keeping, "one")
    [message] = first["output"]
    named = [
        {"role": "user", "content": "one"},
        {"type": "item_reference", "id": message["id"]},
        {"role": "user", "content": "two"},
    ]
    second = respond(keeping, named, stream=stream)
    said = (("user", "one"), ("assistant", text_of(first)), ("user", "two"))
    assert text_of(second) == truth(*said)
    third = respond(keeping, "three", previous_response_id=second["id"])
    assert text_of(third) == truth(*said, ("assistant", text_of(second)), ("user", "three")), "it is kept whole"
    given = keeping.client.get(f"{PATH}/{second['id']}/input_items").json()["data"]
    again = respond(keeping, [{"type": "item_reference", "id": given[-1]["id"]}])
    assert text_of(again) == truth(("user", "one"))
    counted = keeping.post(f"{PATH}/input_tokens", {"input": named}).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": second["usage"]["input_tokens"]}


def test_an_item_that_is_not_there_is_named(keeping: FakeServer):
    error = refusal(keeping.post(PATH, {**GREEDY, "input": [{"type": "item_reference", "id": "msg_none"}]}))
    assert (error["param"], "'msg_none' not found" in error["message"]) == ("input[0].id", True)
