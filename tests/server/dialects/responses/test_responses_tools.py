"""Tools of /v1/responses that are no functions: what the model is shown, and how its calls are answered; and items of
histories of every type.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from kvloom.server.dialects.openai.custom import InputText
from tests.support.models.templates import HERMES, TemplateTokenizer
from tests.support.scripted import scripted_server
from tests.support.servers import MODEL, FakeServer, fake_server

SAYS = {"answer": "yes"}
F = {"type": "function", "name": "f", "description": "Does f.", "parameters": {"type": "object", "properties": {}}}
SPACE = {"type": "namespace", "name": "mcp__x", "description": "d", "tools": [{**F, "name": "g"}]}
CUSTOM = {"type": "custom", "name": "patch", "description": "Patches."}
LARK = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"'}
LIST = {"command": ["ls", "-l"], "working_directory": "/w"}
PATCH = {"type": "delete_file", "path": "p"}
ALLOWED = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "x"}, {"type": "custom", "name": "patch"}]}
SEARCH = {"type": "tool_search", "execution": "client", "description": "Finds.", "parameters": F["parameters"]}


def script(prompt: str) -> str:
    SAYS["prompt"] = prompt
    return SAYS["answer"]


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """Its model says SAYS["answer"]."""
    with scripted_server(TemplateTokenizer(HERMES), script) as (running, _):
        yield running


@pytest.fixture(scope="module")
def choosing() -> Iterator[FakeServer]:
    """Its model writes what a grammar allows."""
    with fake_server(tokenizer=TemplateTokenizer(HERMES), max_seq_len=8192) as running:
        yield running


def call(name: str, arguments: Any) -> str:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return f'<tool_call>{{"name": "{name}", "arguments": {text}}}</tool_call>'


def respond(server: FakeServer, answer: str, **fields: Any) -> Any:
    """The response, which its stream ends with too."""
    SAYS["answer"] = answer
    body = {"model": MODEL, "input": "hi", **fields}
    whole = server.post("/v1/responses", body)
    assert whole.status_code == 200, whole.text
    told = whole.json()
    told["notes"] = whole.headers.get("x-warning", "")
    stream = server.post("/v1/responses", {**body, "stream": True}).text
    told["events"] = [json.loads(block.split("\ndata: ")[1]) for block in stream.split("\n\n")[:-1]]
    last = told["events"][-1]["response"]["output"]
    assert without_ids(last) == without_ids(told["output"])
    return told


def without_ids(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key not in ("id", "call_id")} for item in items]


def prompt() -> str:
    return TemplateTokenizer.rendered[-1]


def deltas(told: Any, kind: str) -> str:
    return "".join(event["delta"] for event in told["events"] if event["type"] == f"response.{kind}.delta")


def test_tools_that_openai_runs_are_left_out_and_told(server: FakeServer):
    hosted = [{"type": "web_search", "external_web_access": False}, {"type": "next_month", "name": "n"}]
    told = respond(server, call("f", {}), tools=[F, *hosted, {"type": "tool_search"}])
    assert [item["name"] for item in told["output"]] == ["f"]
    assert "web_search" not in prompt()
    assert told["tools"][1] == hosted[0]
    assert told["notes"].count("is left out") == 3


def test_functions_of_a_namespace_are_answered_with_it(server: FakeServer):
    told = respond(server, call("mcp__x__g", {"a": 1}), tools=[F, SPACE])
    [item] = told["output"]
    assert (item["type"], item["name"], item["namespace"]) == ("function_call", "g", "mcp__x")
    assert json.loads(item["arguments"]) == {"a": 1}
    assert deltas(told, "function_call_arguments") == item["arguments"]
    assert '"mcp__x__g"' in prompt()
    [bare] = respond(server, call("g", {}), tools=[F, SPACE])["output"]
    assert (bare["name"], bare.get("namespace")) == ("g", "mcp__x")
    [unknown] = respond(server, call("h", {}), tools=[F, SPACE])["output"]
    assert (unknown["name"], unknown.get("namespace")) == ("h", None)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin\\n\\"x\\" \\u00e9 \\ud83d\\ude00 \\\\ end"}', '*** Begin\n"x" é 😀 \\ end'),
        ('{ "input" : "" }', ""),
        ('{"input": "\\ud83d!"}', "\ufffd!"),
        ('{"patch": "other"}', "other"),
        ('{"a": {"b": 1}}', '{"b": 1}'),
        ('{"a": 1, "b": 2}', '{"a": 1, "b": 2}'),
        ('{"input": 5}', "5"),
    ],
)
def test_the_input_of_a_custom_tool_is_a_text(server: FakeServer, arguments: str, text: str):
    told = respond(server, call("patch", arguments), tools=[CUSTOM])
    [item] = told["output"]
    assert (item["type"], item["name"], item["input"], item["status"]) == (
        "custom_tool_call",
        "patch",
        text,
        "completed",
    )
    assert deltas(told, "custom_tool_call_input") == text
    [done] = [event for event in told["events"] if event["type"] == "response.custom_tool_call_input.done"]
    assert (done["input"], done["item_id"]) == (text, told["events"][-1]["response"]["output"][0]["id"])


def test_the_input_of_a_custom_tool_is_read_however_it_is_cut():
    text = '{"input": "a\\u00e9\\ud83d\\ude00\\"\\n\\q\\uZZZZ"} '
    whole = InputText().add(text)
    reader = InputText()
    assert "".join(map(reader.add, text)) == whole == 'aé😀"\nqZZZZ'


def test_a_custom_tools_grammar_is_shown_and_one_that_is_recursive_is_not_held(server: FakeServer):
    regex = {"type": "grammar", "syntax": "regex", "definition": "[ab]{3}/?"}
    respond(server, "yes", tools=[{**CUSTOM, "format": regex}])
    assert '"pattern": "^(?:[ab]{3}/?)$"' in prompt()
    told = respond(server, "yes", tools=[{**CUSTOM, "format": LARK}])
    assert "The input follows this grammar (lark):" in SAYS["prompt"]
    assert ("pattern" in SAYS["prompt"], told["notes"]) == (False, "")
    nested = {**LARK, "definition": 'start: "(" start? ")"'}
    told = respond(server, "yes", tools=[{**CUSTOM, "format": nested}])
    assert told["notes"] == "tools[0].format is told to the model, and not held"


@pytest.mark.parametrize("choice", ["required", {"type": "custom", "name": "patch"}])
def test_the_input_of_a_custom_tool_follows_its_lark_grammar(choosing: FakeServer, choice: Any):
    held = {**CUSTOM, "format": {**LARK, "definition": 'start: WORD "\\n" ("b" | "\\"")~2\nWORD: /[xyz]{1,5}/'}}
    for seed in range(3):
        told = respond(choosing, "", tools=[held], tool_choice=choice, parallel_tool_calls=False, seed=seed)
        [item] = told["output"]
        assert re.fullmatch(r'[xyz]{1,5}\n[b"]{2}', item["input"])
        assert deltas(told, "custom_tool_call_input") == item["input"]


@pytest.mark.parametrize(
    ("tool", "arguments", "found"),
    [
        (
            "local_shell", LIST,
            {"type": "local_shell_call", "action": {"type": "exec", "env": {}} | LIST},
        ),
        ("shell", {"commands": ["ls"]}, {"type": "shell_call", "action": {"commands": ["ls"]}}),
        ("apply_patch", PATCH, {"type": "apply_patch_call", "operation": PATCH}),
    ],
)  # fmt: skip
def test_tools_that_the_client_runs_have_calls_of_their_own(server: FakeServer, tool: str, arguments: Any, found: Any):
    [item] = without_ids(respond(server, call(tool, arguments), tools=[{"type": tool}])["output"])
    assert item == {"status": "completed", **found}
    [cut] = respond(server, call(tool, "{"), tools=[{"type": tool}], max_output_tokens=40)["output"]
    assert cut["type"] == found["type"]


def test_deferred_tools_are_shown_once_a_search_has_found_them(server: FakeServer):
    deferred = {**F, "name": "later", "defer_loading": True}
    told = respond(server, call("tool_search", {"query": "q"}), tools=[F, deferred, SEARCH])
    [item] = told["output"]
    assert (item["type"], item["execution"], item["arguments"]) == ("tool_search_call", "client", {"query": "q"})
    assert '"later"' not in prompt()
    found = {
        "type": "tool_search_output",
        "call_id": item["call_id"],
        "tools": [{**SPACE, "tools": [deferred]}, deferred],
    }
    items = [{"role": "user", "content": "hi"}, item, found]
    [called] = respond(server, call("mcp__x__later", {}), tools=[F, deferred, SEARCH], input=items)["output"]
    assert (called["name"], called["namespace"]) == ("later", "mcp__x")
    listed, _, rest = prompt().partition("These tools can be called now:")
    assert '"later"' not in listed
    assert '{"name": "later", "description"' in rest
    assert '{"name": "mcp__x__later", "description"' in rest
    more = [{"role": "user", "content": "hi"}, {"type": "additional_tools", "role": "developer", "tools": [deferred]}]
    respond(server, "yes", tools=[F, SEARCH], input=more)
    assert '"later"' in prompt()
    respond(server, "yes", tools=[F, deferred, {"type": "tool_search", "execution": "server"}])
    assert '"later"' in prompt()  # nobody else would find it


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "custom", "name": "patch"}, {"custom_tool_call"}),
        ({"type": "function", "name": "g", "namespace": "mcp__x"}, {"function_call"}),
        ({"type": "local_shell"}, {"local_shell_call"}),
        (ALLOWED, {"custom_tool_call"}),
    ],
)  # fmt: skip
def test_a_tool_of_any_type_may_be_chosen(choosing: FakeServer, choice: Any, names: set[str]):
    body = {"model": MODEL, "input": "hi", "tools": [F, SPACE, CUSTOM, {"type": "local_shell"}], "tool_choice": choice}
    answer = choosing.post("/v1/responses", {**body, "max_output_tokens": 800, "seed": 3})
    assert answer.status_code == 200, answer.text
    assert answer.json()["tool_choice"] == choice
    assert {item["type"] for item in answer.json()["output"]} == names


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "tool_choice": {"type": "custom"}}, "tool_choice.name"),
        ({"tools": [{"name": "f"}]}, "tools[0].type"),
        ({"tools": [{**CUSTOM, "format": {**LARK, "definition": "start: nothing"}}]}, "tools[0].format"),
        ({"tools": [{**CUSTOM, "format": {**LARK, "syntax": "regex", "definition": "(a"}}]}, "tools[0].format"),
        ({"tools": [{**F, "parameters": []}]}, "tools[0].parameters"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        ({"tools": [{**SPACE, "tools": [{**F, "strict": 5}]}]}, "tools[0].tools[0].strict"),
        ({"tools": [{**SPACE, "tools": [{**F, "name": "a b"}]}]}, "tools[0].tools[0].name"),
        ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input[0].type"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c"}]}, "input[0].name"),
        ({"input": [{"type": "local_shell_call", "action": {}}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": [{"type": "x"}]}]},
            "input[0].output[0]",
        ),
        ({"input": [{"type": "web_search_call", "id": "ws"}]}, "input"),
    ],
)  # fmt: skip
def test_what_would_contradict_the_request_is_a_400_that_names_the_field(server: FakeServer, fields: Any, param: str):
    response = server.post("/v1/responses", {"model": MODEL, "input": "hi", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


HISTORY: list[tuple[list[dict[str, Any]], str]] = [
    (
        [
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "a\nb"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"},
        ],
        'assistant: <tool_call>{"name": "patch", "arguments": {"input": "a\\nb"}}</tool_call>\ntool: ok',
    ),
    (
        [
            {"type": "function_call", "call_id": "c", "namespace": "n", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": {"a": 1}},
        ],
        '<tool_call>{"name": "n__g", "arguments": {}}</tool_call>\ntool: {"a":1}',
    ),
    (
        [
            {"type": "local_shell_call", "call_id": "c", "action": {"type": "exec", "command": ["ls"], "user": None}},
            {"type": "local_shell_call_output", "call_id": "c", "output": "x"},
        ],
        '<tool_call>{"name": "local_shell", "arguments": {"command": ["ls"]}}</tool_call>\ntool: x',
    ),
    (
        [
            {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "x", "stderr": ""}]},
        ],
        'tool: [{"stdout":"x","stderr":""}]',
    ),
    (
        [{"type": "mcp_call", "id": "m", "server_label": "s", "name": "t", "arguments": "{}", "output": "o"}],
        '<tool_call>{"name": "s__t", "arguments": {}}</tool_call>\ntool: o',
    ),
    (
        [{"type": "mcp_call", "id": "m", "server_label": "s", "name": "t", "arguments": "{}", "error": {"type": "e"}}],
        'tool: {"type":"e"}',
    ),
    (
        [
            {"type": "next_call", "call_id": "c", "name": "n", "input": "x"},
            {"type": "next_call_output", "call_id": "c", "output": "y"},
        ],
        '<tool_call>{"name": "n", "arguments": {"input": "x"}}</tool_call>\ntool: y',
    ),
    ([{"type": "agent_message", "role": "assistant", "content": "hm"}], "assistant: hm"),
]


@pytest.mark.parametrize(("items", "text"), HISTORY)
def test_items_of_every_type_are_shown(server: FakeServer, items: list[dict[str, Any]], text: str):
    respond(server, "yes", tools=[F], input=[{"role": "user", "content": "hi"}, *items])
    assert text in prompt()


@pytest.mark.parametrize("kind", ["web_search_call", "image_generation_call", "next_month"])
def test_items_without_anything_to_show_are_left_out_and_told(server: FakeServer, kind: str):
    told = respond(
        server, "yes", input=[{"role": "user", "content": "hi"}, {"type": kind, "id": "i", "status": "completed"}]
    )
    assert told["notes"] == f"input[1] is left out: the model is not shown items of the type '{kind}'"
    told = respond(server, "yes", include=["next.month"])
    assert told["notes"] == "include[0] has no effect: 'next.month' is not known here"
