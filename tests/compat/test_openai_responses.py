"""The official openai client on responses that are kept, and on conversations."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvloom.server.keeping.store import ResponseStore
from tests.support.lazily import lazily
from tests.support.servers import MODEL, FakeServer, fake_server

openai = lazily("openai")

pytestmark = pytest.mark.compat
KEYS = ("kvl-0123456789abcdef0123456789abcdef", "kvl-fedcba9876543210fedcba9876543210")


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    store = ResponseStore(tmp_path_factory.mktemp("store") / "responses.db")
    with fake_server(store=store, keys=KEYS) as running:
        yield running
    store.close()


@pytest.fixture(scope="module")
def client(keyed: FakeServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=keyed.url + "/v1", api_key=KEYS[0], max_retries=0) as client:
        yield client


def test_responses_are_retrieved_gone_on_from_and_deleted(client: openai.OpenAI):
    first = client.responses.create(model=MODEL, input="one", max_output_tokens=20, metadata={"a": "b"})
    assert client.responses.retrieve(first.id) == first
    second = client.responses.create(model=MODEL, input="two", previous_response_id=first.id, truncation="auto")
    assert (second.previous_response_id, second.truncation) == (first.id, "auto")
    items = list(client.responses.input_items.list(second.id))
    assert [item.content[0].text for item in items] == ["two"]
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="a", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError, match="not running"):
        client.responses.cancel(second.id)
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.create(model=MODEL, input="a", background=True)


def test_a_streamed_response_is_kept_and_items_come_in_pages(client: openai.OpenAI):
    said = [{"role": "user", "content": f"text {i}"} for i in range(7)]
    *_, last = client.responses.create(model=MODEL, input=said, max_output_tokens=20, stream=True)
    final = last.response
    kept = client.responses.retrieve(final.id)
    assert (kept.output_text, kept.usage, kept.store) == (final.output_text, final.usage, True)
    texts = [item.content[0].text for item in client.responses.input_items.list(final.id, limit=2, order="asc")]
    assert texts == [f"text {i}" for i in range(7)]


def test_a_running_response_is_cancelled(client: openai.OpenAI):
    fields = {"model": MODEL, "input": "a", "max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
    stream = client.responses.create(stream=True, **fields)
    created = next(iter(stream)).response
    assert client.responses.cancel(created.id).status == "cancelled"
    *_, last = stream
    assert last.response.status == "cancelled"
    assert client.responses.retrieve(created.id).status == "cancelled"


def test_conversations(client: openai.OpenAI):
    made = client.conversations.create(metadata={"a": "b"}, items=[{"role": "user", "content": "before"}])
    assert client.conversations.retrieve(made.id) == made
    answer = client.responses.create(model=MODEL, input="one", conversation=made.id, max_output_tokens=10)
    assert answer.conversation is not None
    assert answer.conversation.id == made.id
    items = list(client.conversations.items.list(made.id, order="asc", limit=2))
    assert [item.role for item in items] == ["user", "user", "assistant"]
    assert items[2].content[0].text == answer.output_text
    added = client.conversations.items.create(made.id, items=[{"role": "developer", "content": "Rhyme."}])
    assert client.conversations.items.retrieve(added.data[0].id, conversation_id=made.id).role == "developer"
    assert client.conversations.items.delete(added.data[0].id, conversation_id=made.id).id == made.id
    assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(made.id)


def test_another_tenant_sees_nothing(client: openai.OpenAI):
    kept = client.responses.create(model=MODEL, input="secret", max_output_tokens=5)
    made = client.conversations.create()
    other = client.with_options(api_key=KEYS[1])
    with pytest.raises(openai.NotFoundError):
        other.responses.retrieve(kept.id)
    with pytest.raises(openai.NotFoundError):
        other.conversations.delete(made.id)
    assert client.conversations.retrieve(made.id).id == made.id


def test_options_that_are_told_back(client: openai.OpenAI):
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "look"}]}
    answer = client.responses.create(
        model=MODEL, input="a", max_output_tokens=5, max_tool_calls=2, service_tier="auto", tools=[tool],
        tool_choice=allowed, text={"verbosity": "low"},
    )  # fmt: skip
    assert (answer.max_tool_calls, answer.service_tier, answer.text.verbosity) == (2, "default", "low")
    assert answer.tool_choice.type == "allowed_tools"
