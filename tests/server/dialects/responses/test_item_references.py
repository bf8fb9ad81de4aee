"""Items of an input that are only named by the id that the store gave them."""

import pytest

from tests.support.servers import FakeServer
from tests.support.wire.responses import GREEDY, PATH, refusal, respond, text_of, truth


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


def test_an_error_quotes_a_long_id_in_part(keeping: FakeServer):
    given = [{"type": "item_reference", "id": "x" * 5_000}]
    error = refusal(keeping.post(PATH, {**GREEDY, "input": given}))
    assert error["message"].startswith("input[0].id: Item with id 'xxx")
    assert len(error["message"]) < 2100
