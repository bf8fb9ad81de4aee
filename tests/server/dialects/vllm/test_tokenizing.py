"""/tokenize and /detokenize: the fields of vLLM's server, for the requested model."""

import pytest

from kvloom.rank.fake import EOS_ID, VOCAB_SIZE, ByteTokenizer
from kvloom.server.serving.options import WireOptions
from tests.support.servers import MODEL, FakeServer, fake_server

MESSAGES = [{"role": "user", "content": "hello"}]


class MarkingTokenizer(ByteTokenizer):
    """Begins every text with a special token if asked to, as the tokenizers of many models do."""

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        return [EOS_ID] * add_special_tokens + super().encode(text, max_tokens=max_tokens)


@pytest.fixture
def marking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.servers.ByteTokenizer", MarkingTokenizer)


def test_a_prompt_in_tokens(server: FakeServer):
    answer = server.post("/tokenize", {"model": MODEL, "prompt": "hé"}).json()
    assert answer == {"count": 3, "max_model_len": 2048, "tokens": [104, 0xC3, 0xA9], "token_strs": None}
    answer = server.post("/tokenize", {"prompt": "hi", "return_token_strs": True}).json()
    assert answer["token_strs"] == ["h", "i"]


def test_messages_are_tokenized_as_chat_does(server: FakeServer):
    tokens = server.post("/tokenize", {"messages": MESSAGES}).json()["tokens"]
    assert bytes(tokens).decode() == ByteTokenizer().apply_chat_template(MESSAGES)
    assert len(tokens) == server.chat("hello", max_tokens=1).json()["usage"]["prompt_tokens"]
    bare = server.post("/tokenize", {"messages": MESSAGES, "add_generation_prompt": False}).json()["tokens"]
    assert bytes(bare).decode() == "user: hello\n"


def test_tools_are_part_of_the_prompt_as_in_chat(server: FakeServer):
    tools = [{"type": "function", "function": {"name": "weather", "description": "Of a city."}}]
    tokens = server.post("/tokenize", {"messages": MESSAGES, "tools": tools}).json()["tokens"]
    assert len(tokens) == server.chat("hello", max_tokens=1, tools=tools).json()["usage"]["prompt_tokens"]
    assert b"weather" in bytes(tokens)


@pytest.mark.parametrize(
    ("fields", "is_marked"),
    [
        ({"prompt": "a"}, True),
        ({"prompt": "a", "add_special_tokens": False}, False),
        ({"messages": MESSAGES}, False),
        ({"messages": MESSAGES, "add_special_tokens": True}, True),
    ],
)
@pytest.mark.usefixtures("marking")
def test_special_tokens_come_where_they_are_wanted(fields: dict[str, object], is_marked: bool):
    with fake_server() as server:
        tokens = server.post("/tokenize", fields).json()["tokens"]
    assert (tokens[0] == EOS_ID) == is_marked


def test_there_and_back(server: FakeServer):
    text = "Grüße,\n🙂 <eos>"
    tokens = server.post("/tokenize", {"prompt": text}).json()["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json() == {"prompt": text}
    assert server.post("/detokenize", {"tokens": [104, EOS_ID]}).json() == {"prompt": "h<eos>"}
    assert server.post("/detokenize", {"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        (
            "/tokenize",
            {"messages": MESSAGES, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        ("/tokenize", {"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
        (
            "/tokenize",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0].image_url",
        ),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, VOCAB_SIZE]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
    ],
)
def test_bad_input_is_named_as_on_v1(server: FakeServer, path: str, body: dict[str, object], param: str):
    response = server.post(path, body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert error["message"].startswith(param)


def test_a_chat_refuses_template_values_that_the_request_itself_has(server: FakeServer):
    for name in ("messages", "tools", "add_generation_prompt", "self"):
        response = server.chat("hi", chat_template_kwargs={name: []})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")


def test_another_model_is_a_404_where_names_are_checked():
    with fake_server(options=WireOptions(validates_model=True)) as server:
        for path, fields in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
            response = server.post(path, {"model": "other", **fields})
            assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
        assert server.client.get("/tokenize").json()["error"]["type"] == "invalid_request_error"
