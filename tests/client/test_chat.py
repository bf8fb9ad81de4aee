"""`kvloom chat`: one conversation, its history, and answers that the user interrupts."""

import io
from collections.abc import Iterator

import httpx
import pytest
from rich.console import Console

from kvloom.client import cli
from kvloom.client.chat import Chat, ChatFailed, first_model, run
from kvloom.contract.errors import BadRequest
from kvloom.server.serving.options import WireOptions
from tests.support.servers import MODEL, FakeServer, fake_server


@pytest.fixture
def chat() -> Iterator[Chat]:
    """The client of a server whose answers are deterministic."""
    with fake_server(seed=1) as server:
        yield Chat(server.client, first_model(server.client))


def test_an_answer_comes_in_pieces_and_joins_the_history(chat: Chat):
    pieces = list(chat.ask("hello"))
    assert chat.messages == [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "".join(pieces)}]
    list(chat.ask("and again"))
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 2
    chat.reset()
    assert chat.messages == []


def test_an_answer_that_is_stopped_stays_in_the_history_as_far_as_it_came(chat: Chat):
    pieces = chat.ask("hello")
    first = next(pieces)
    pieces.close()
    assert chat.messages[-1] == {"role": "assistant", "content": first}


@pytest.fixture
def refused() -> Iterator[Chat]:
    """Asks for a model that the server does not have, and checks the refusal."""
    with fake_server(options=WireOptions(validates_model=True)) as server:
        yield Chat(server.client, "gpt-9")


def test_a_question_that_is_refused_leaves_no_trace(refused: Chat):
    chat = refused
    with pytest.raises(ChatFailed, match="does not exist"):
        list(chat.ask("hello"))
    assert chat.messages == []


def session(chat: Chat, *lines: str) -> str:
    """What the terminal shows when these lines are typed."""
    typed = iter(lines)

    def read(prompt: str) -> str:
        try:
            return next(typed)
        except StopIteration:
            raise EOFError from None

    console = Console(file=io.StringIO(), width=200)
    run(chat, console, read)
    return console.file.getvalue()


def test_a_session_with_its_commands(chat: Chat):
    shown = session(chat, "hello", "/reset", "/what", "", "/exit", "never asked")
    assert "a new conversation" in shown
    assert shown.count("/reset begins anew") == 2
    assert chat.messages == []


def test_an_error_is_shown_and_the_session_goes_on(refused: Chat):
    assert "does not exist" in session(refused, "hello", "/exit")


def test_ctrl_c_stops_the_answer_and_not_the_program(chat: Chat, monkeypatch):
    def interrupted(text: str):
        yield "half"
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "ask", interrupted)
    shown = session(chat, "hello", "/reset", "/exit")
    assert "half [stopped]" in shown
    assert "a new conversation" in shown


def test_a_server_that_is_not_there_is_one_sentence():
    with httpx.Client(base_url="http://127.0.0.1:9") as client, pytest.raises(ChatFailed) as failed:
        first_model(client)
    assert str(failed.value).startswith("http://127.0.0.1:9 does not list its models: ")
    assert str(failed.value).endswith("is it running? `kvloom serve` starts one")


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (404, "it answered 404 Not Found to /v1/models"),
        (401, "it answered 401 Unauthorized to /v1/models; give its key with --api-key"),
    ],
)
def test_a_server_that_refuses_to_list_its_models_is_one_line(status: int, words: str):
    transport = httpx.MockTransport(lambda request: httpx.Response(status))
    with pytest.raises(ChatFailed) as failed:
        first_model(httpx.Client(base_url="http://other", transport=transport))
    assert str(failed.value) == f"http://other does not list its models: {words}"


def test_an_address_without_a_scheme_is_told_what_it_lacks():
    with httpx.Client(base_url="localhost:1025") as client, pytest.raises(ChatFailed, match="begins with http:// or"):
        first_model(client)


@pytest.mark.parametrize("url", ["http://other", "http://other/", "http://other/v1", "http://other/v1/"])
def test_an_address_goes_with_and_without_v1_as_for_other_clients(url: str, monkeypatch: pytest.MonkeyPatch):
    chats: list[Chat] = []
    monkeypatch.setattr(cli, "run", lambda chat, console: chats.append(chat))
    cli.chat(url=url, model="m")
    assert [chat._client.base_url for chat in chats] == ["http://other"]


def chat_with(events: str) -> Chat:
    """A client of a server that sends these events for every request."""
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=events))
    return Chat(httpx.Client(base_url="http://other", transport=transport), "m")


def test_events_of_other_servers_are_read_with_and_without_a_space():
    event = '{"choices": [{"delta": {"content": "a"}}]}'
    events = f': comment\n\ndata:{event}\n\ndata: {event}\n\ndata: {{"choices": []}}\n\ndata:[DONE]\n\n'
    assert list(chat_with(events).ask("hi")) == ["a", "a"]


@pytest.mark.parametrize("event", ["{", "[1]", "5", '{"choices": [{}]}', '{"choices": [5]}', "[" * 99_999])
def test_an_event_that_is_no_part_of_a_chat_is_one_sentence(event):
    with pytest.raises(ChatFailed, match="the server sent what is no part of a chat"):
        list(chat_with(f"data: {event}\n\n").ask("hi"))


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (302, "", "the server answered 302 Found"),
        (500, "", "the server answered 500 Internal Server Error"),
        (400, '{"error": {"message": null}}', '{"error": {"message": null}}'),
    ],
)
def test_a_refusal_without_a_message_says_what_there_is(status: int, body: str, words: str):
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=body))
    with pytest.raises(ChatFailed) as failed:
        list(Chat(httpx.Client(base_url="http://other", transport=transport), "m").ask("hi"))
    assert str(failed.value) == words


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "what://127.0.0.1:9"])
def test_a_proxy_of_the_environment_is_not_asked(server: FakeServer, proxy: str, monkeypatch: pytest.MonkeyPatch):
    for name in ("http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy)
    found: list[str] = []
    monkeypatch.setattr(cli, "run", lambda chat, console: found.extend(chat.ask("hi")))
    cli.chat(url=server.url)
    assert found


@pytest.mark.parametrize("key", ["ключ", "a\nb", "\ud800"])
def test_a_key_that_no_header_can_carry_is_one_sentence(key: str):
    with pytest.raises(BadRequest, match="api_key: must be printable ASCII characters"):
        cli.chat(api_key=key, model="m")


def test_a_host_that_cannot_be_looked_up_is_one_sentence():
    with pytest.raises(ChatFailed, match="is no URL"):
        cli.chat(url="http://a..b", model="m")


def test_half_a_character_is_not_sent():
    with pytest.raises(ChatFailed, match="it holds half a character"):
        list(chat_with("").ask("\ud800"))


@pytest.mark.parametrize("body", ["[]", '{"data": 5}', "[" * 99_999])
def test_a_list_of_models_that_is_none_is_one_sentence(body):
    transport = httpx.MockTransport(lambda request: httpx.Response(200, text=body))
    with pytest.raises(ChatFailed, match="does not answer like an OpenAI server"):
        first_model(httpx.Client(base_url="http://other", transport=transport))


def test_the_first_model_is_the_default(server: FakeServer):
    assert first_model(server.client) == MODEL


def test_a_temperature_is_sent_when_there_is_one():
    def said(temperature: float | None) -> str:
        with fake_server(seed=None) as server:
            return "".join(Chat(server.client, MODEL, temperature).ask("hello"))

    assert said(0) == said(0)
    assert said(None) != said(None)
