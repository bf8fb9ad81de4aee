"""Requests without sampling parameters use the defaults of the model's files; explicit ones take precedence."""

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.server.serving.card import ModelCard
from tests.support.servers import MODEL, fake_server

ADVICE = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1}
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
TEXT = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
ASKED = {"temperature": 0.3, "top_k": 3, "top_p": 0.5, "min_p": 0.2, "repetition_penalty": 1.5}
OFF = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1}


@pytest.fixture(scope="module")
def served():
    """A server, and the requests that its engine received."""
    with fake_server(card={"advice": ADVICE}) as server:
        given, open_ = [], server.engine.open
        server.engine.open = lambda requests: given.extend(requests) or open_(requests)
        yield server, given


def sampled(served, path, body):
    """The sampling parameters with which the engine ran `body`: those that files may advise."""
    server, given = served
    given.clear()
    reply = server.client.post(path, json=body)
    assert reply.status_code == 200, reply.text
    params = given[0].params
    return {name: getattr(params, name) for name in ADVICE}


ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": {"model": MODEL, "input": "hi", "max_output_tokens": 1},
    "/v1/messages": CHAT,
    "/api/chat": CHAT | {"stream": False, "options": {"num_predict": 1}},
    "/api/generate": TEXT | {"stream": False, "options": {"num_predict": 1}},
}


@pytest.mark.parametrize("path", ROUTES)
def test_a_request_that_says_nothing_is_sampled_as_advised(path, served):
    assert sampled(served, path, ROUTES[path]) == ADVICE


@pytest.mark.parametrize("said", [ASKED, OFF], ids=["other values", "neutral values"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_what_a_request_says_stays(path, said, served):
    assert sampled(served, path, ROUTES[path] | said) == said


def test_what_a_request_of_ollama_says_stays(served):
    said = {"repeat_penalty" if name == "repetition_penalty" else name: value for name, value in ASKED.items()}
    body = ROUTES["/api/chat"] | {"options": {"num_predict": 1, **said}}
    assert sampled(served, "/api/chat", body) == ASKED


def test_what_is_said_does_not_take_the_rest_away(served):
    assert sampled(served, "/v1/messages", CHAT | {"temperature": 0}) == ADVICE | {"temperature": 0}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"inputs": "hi", "parameters": {"max_new_tokens": 1}}),
        ("/generate", {"prompt": "hi", "max_tokens": 1}),
    ],
    ids=["TGI", "vLLM"],
)
def test_protocols_with_neutral_values_of_their_own_keep_them(path, body, served):
    assert sampled(served, path, body) | {"temperature": 1} == OFF


def test_the_console_shows_it(served):
    (model,) = served[0].client.get("/console/config").json()["models"]
    assert model["advice"] == "temperature 0.6, top_k 20, top_p 0.95, min_p 0.01, repetition_penalty 1.1"


def test_a_response_tells_how_it_was_sampled(served):
    body = ROUTES["/v1/responses"]
    told = served[0].client.post("/v1/responses", json=body).json()
    assert (told["temperature"], told["top_p"]) == (0.6, 0.95)
    told = served[0].client.post("/v1/responses", json=body | {"temperature": 0.1}).json()
    assert (told["temperature"], told["top_p"]) == (0.1, 0.95)


@pytest.mark.parametrize(("generation_config", "advice"), [("auto", {"temperature": 0.6}), ("none", {})])
def test_the_advice_is_read_unless_the_configuration_says_none(generation_config, advice, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    card = ModelCard("m", EngineConfig(model=str(tmp_path)), generation_config=generation_config)
    assert card.advised().advice == advice


def test_a_word_that_is_neither_is_refused():
    with pytest.raises(BadRequest, match=r"^generationConfig: must be auto or none, got 'vllm'$"):
        ModelCard("m", EngineConfig(backend="fake"), generation_config="vllm")
