"""Every field that constrains an answer, of any server's API: each route applies it, or refuses it by name."""

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from kvloom.server.dialects.constraints import Constraints
from kvloom.server.dialects.openai.unsupported import _NEUTRAL, Unsupported
from tests.support.servers import MODEL, FakeServer

NUMBERS = {"enum": [12, 34]}
TAG = {"type": "structural_tag", "format": {"type": "regex", "pattern": "[0-9]{2}"}}
LEGACY = {"structures": [{"begin": "<n>", "schema": NUMBERS, "end": "</n>"}], "triggers": ["<n>"]}
GBNF = "root ::= [0-9] [0-9]"
TWO = "[0-9]{2}"
HONOURED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": NUMBERS}}}, TWO),
    ({"response_format": {"type": "json_schema", "schema": NUMBERS}}, TWO),
    ({"response_format": {"type": "json_schema", "value": {"name": "n", "schema": NUMBERS}}}, TWO),
    ({"response_format": {"type": "json_object", "schema": NUMBERS}}, TWO),
    ({"response_format": {"type": "json_object", "value": NUMBERS}}, TWO),
    ({"response_format": {"type": "json", "value": NUMBERS}}, TWO),
    ({"response_format": {"type": "json_object"}}, r"\{.*"),
    ({"response_format": {"type": "regex", "value": TWO}}, TWO),
    ({"response_format": {"type": "regex", "pattern": TWO}}, TWO),
    ({"response_format": {"type": "grammar", "grammar": GBNF}}, TWO),
    ({"response_format": {"type": "ebnf", "ebnf": GBNF}}, TWO),
    ({"response_format": TAG}, TWO),
    ({"response_format": {"type": "structural_tag", "at_least_one": True, **LEGACY}}, f"<n>{TWO}</n>.*"),
    ({"structured_outputs": {"json": NUMBERS}}, TWO),
    ({"structured_outputs": {"json": json.dumps(NUMBERS), "disable_any_whitespace": True}}, TWO),
    ({"structured_outputs": {"regex": TWO}}, TWO),
    ({"structured_outputs": {"choice": ["12", "34"]}}, TWO),
    ({"structured_outputs": {"grammar": GBNF}}, TWO),
    ({"structured_outputs": {"json_object": True}}, r"\{.*"),
    ({"structured_outputs": {"structural_tag": TAG}}, TWO),
    ({"structured_outputs": {"structural_tag": json.dumps({**LEGACY, "at_least_one": True})}}, f"<n>{TWO}</n>.*"),
    ({"guided_json": NUMBERS}, TWO),
    ({"guided_json": json.dumps(NUMBERS), "guided_decoding_backend": "xgrammar"}, TWO),
    ({"guided_regex": TWO}, TWO),
    ({"guided_choice": ["12", "34"]}, TWO),
    ({"guided_grammar": GBNF}, TWO),
    ({"guided_json_object": True}, r"\{.*"),
    ({"structural_tag": json.dumps(TAG)}, TWO),
    ({"regex": TWO}, TWO),
    ({"ebnf": GBNF}, TWO),
    ({"json_schema": json.dumps(NUMBERS)}, TWO),
    ({"json_schema": NUMBERS}, TWO),
    ({"grammar": GBNF}, TWO),
    ({"grammar": {"type": "json", "value": NUMBERS}}, TWO),
    ({"grammar": {"type": "regex", "value": TWO}}, TWO),
    ({"grammar": {"type": "json_schema", "value": {"name": "n", "schema": NUMBERS}}}, TWO),
    ({"format": "json"}, r"\{.*"),
    ({"format": NUMBERS}, TWO),
    ({"output_format": {"type": "json_schema", "schema": NUMBERS}}, TWO),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({name: {"a": 1}}, name) for name in _NEUTRAL if name != "kv_transfer_params"),
    ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
    ({"structured_outputs": {"regex": TWO, "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
    ({"structured_outputs": {"regexp": TWO}}, "regexp"),
    ({"response_format": {"type": "json_object", "shema": NUMBERS}}, "shema"),
    ({"response_format": {"type": "text", "schema": NUMBERS}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema", "pattern": TWO}}, "response_format.pattern"),
    ({"response_format": {"type": "regex"}}, "response_format.pattern"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "qwen_xml"}}}, "response_format.format.type"),
    ({"format": "yaml"}, "format"),
    ({"grammar": '{"grammars": []}'}, "grammar"),
    ({"regex": TWO, "ebnf": GBNF}, "regex"),
]


def _events(response: httpx.Response) -> list[Any]:
    return [json.loads(line[len("data:") :]) for line in response.text.splitlines() if line.startswith("data:")]


def _text_of_infer(response: httpx.Response) -> str:
    return bytes(token for token in response.json()["outputs"][0]["data"] if token < 256).decode(errors="ignore")


# for each route: its path, a body, where the fields go, and how to read the text of its answer
_V2 = f"/v2/models/{MODEL}"
_SAMPLING: dict[str, Any] = {"max_new_tokens": 60, "do_sample": True, "seed": 3}
_OLLAMA = {"num_predict": 60, "seed": 3}
_TENSOR = {"name": "input0", "shape": [1, 2], "datatype": "UINT32", "data": [104, 105]}
Route = tuple[str, dict[str, Any], Callable[[httpx.Response], str]]
TOP: dict[str, Route] = {
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 3},
        lambda response: response.json()["choices"][0]["message"]["content"],
    ),
    "completions": (
        "/v1/completions",
        {"prompt": "hi", "max_tokens": 60, "seed": 3},
        lambda response: response.json()["choices"][0]["text"],
    ),
    "responses": (
        "/v1/responses",
        {"input": "hi", "max_output_tokens": 60, "seed": 3},
        lambda response: response.json()["output"][0]["content"][0]["text"],
    ),
    "messages": (
        "/v1/messages",
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 60, "seed": 3},
        lambda response: response.json()["content"][0]["text"],
    ),
    "ollama-chat": (
        "/api/chat",
        {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": False, "options": _OLLAMA},
        lambda response: response.json()["message"]["content"],
    ),
    "ollama-generate": (
        "/api/generate",
        {"model": MODEL, "prompt": "hi", "stream": False, "options": _OLLAMA},
        lambda response: response.json()["response"],
    ),
    "vllm": (
        "/generate",
        {"prompt": "hi", "max_tokens": 60, "seed": 3},
        lambda response: response.json()["text"][0][2:],
    ),
}
INNER: dict[str, Route] = {
    "tgi": ("/generate", {"inputs": "hi"}, lambda response: response.json()["generated_text"]),
    "tgi-root": ("/", {"inputs": "hi"}, lambda response: response.json()[0]["generated_text"]),
    "tgi-stream": ("/generate_stream", {"inputs": "hi"}, lambda response: _events(response)[-1]["generated_text"]),
    "triton": (f"{_V2}/generate", {"text_input": "hi"}, lambda response: response.json()["text_output"]),
    "triton-stream": (
        f"{_V2}/generate_stream",
        {"text_input": "hi"},
        lambda response: "".join(event["text_output"] for event in _events(response)),
    ),
    "triton-infer": (f"{_V2}/infer", {"inputs": [_TENSOR]}, _text_of_infer),
    "native": ("/infer", {"inputs": "hi"}, lambda response: response.json()["generated_text"]),
    "native-token": ("/infer_token", {"input_id": [104, 105]}, lambda response: response.json()["generated_text"]),
}
ROUTES = {**TOP, **INNER}


def _ask(server: FakeServer, route: str, fields: dict[str, Any]) -> httpx.Response:
    path, body, _ = ROUTES[route]
    asked = {**body, **fields} if route in TOP else {**body, "parameters": {**_SAMPLING, **fields}}
    return server.post(path, asked)


def _shown(value: tuple[dict[str, Any], str]) -> str:
    return json.dumps(value[0])[:60]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("row", HONOURED, ids=_shown)
def test_a_constraint_is_honoured_on_every_route(server: FakeServer, route: str, row: tuple[dict[str, Any], str]):
    fields, pattern = row
    response = _ask(server, route, fields)
    assert response.status_code == 200, response.text
    text = ROUTES[route][2](response)
    assert re.fullmatch(pattern, text, re.DOTALL), text


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("row", REFUSED, ids=_shown)
def test_what_cannot_be_done_is_refused_by_name_on_every_route(
    server: FakeServer, route: str, row: tuple[dict[str, Any], str]
):
    fields, name = row
    response = _ask(server, route, fields)
    assert response.status_code == (400 if ROUTES[route][0].startswith(("/v1/", "/api/")) else 422), response.text
    assert name in response.text


@pytest.mark.parametrize("route", INNER)
@pytest.mark.parametrize("name", ["guided_regex", "grammar", "regex", "stop_regex", "response_format"])
def test_beside_the_parameters_a_constraint_is_refused(server: FakeServer, route: str, name: str):
    path, body, _ = INNER[route]
    given = {"type": "json_object"} if name == "response_format" else "root ::= [0-9]"
    response = server.post(path, {**body, name: given})
    assert (response.status_code, name in response.json()["error"]) == (422, True)


@pytest.mark.parametrize("route", ROUTES)
def test_what_asks_for_nothing_is_no_constraint(server: FakeServer, route: str):
    neutral = {name: values[-1] for name, values in _NEUTRAL.items()}
    nothing = {"grammar": "", "regex": "", "json_schema": None, "format": "", "response_format": {"type": "text"}}
    plain = ROUTES[route][2](_ask(server, route, {}))
    assert ROUTES[route][2](_ask(server, route, {**neutral, **nothing})) == plain


def test_every_field_of_a_constraint_is_in_these_tables():
    honoured = {name for fields, _ in HONOURED for name in fields}
    assert set(Constraints.__struct_fields__) - set(Unsupported.__struct_fields__) <= honoured
    assert set(Unsupported.__struct_fields__) == set(_NEUTRAL)


@pytest.mark.parametrize(
    ("route", "fields"),
    [
        ("responses", {"text": {"format": {"type": "json_schema", "name": "n", "schema": NUMBERS}}}),
        ("responses", {"text": {"format": {"type": "json_object", "schema": NUMBERS}}}),
        ("messages", {"output_config": {"format": {"type": "json_schema", "schema": NUMBERS}}}),
    ],
)
def test_a_routes_own_field_is_honoured_and_goes_with_no_other(server: FakeServer, route: str, fields: dict[str, Any]):
    assert re.fullmatch(TWO, ROUTES[route][2](_ask(server, route, fields)))
    both = _ask(server, route, {**fields, "regex": "a"})
    assert (both.status_code, "are both given" in both.json()["error"]["message"]) == (400, True)


def test_a_format_of_text_with_a_schema_is_refused(server: FakeServer):
    refused = _ask(server, "responses", {"text": {"format": {"type": "text", "schema": NUMBERS}}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text.format.schema")
