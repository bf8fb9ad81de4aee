"""Tools for models whose chat template does not know them: the system message describes them, in hermes form."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvloom.server.chat.content import joined
from kvloom.server.chat.form import HERMES

OPEN, CLOSE = HERMES.begin, HERMES.end.strip()
_PROMPT = """You can call functions. They are described here as JSON, one a line:
{tools}
To call a function, write this and nothing else, once for each call:
{open}
{{"name": "the function's name", "arguments": {{"parameter": "value"}}}}
{close}
You will be given what it returned between <tool_response> and </tool_response>."""


def with_tools_in_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The conversation without tool_calls and role tool: calls become text, results become user messages.

    `tools` in the form of chat templates.
    """
    found: list[dict[str, Any]] = []
    is_result = False  # whether the message before was a result
    for message in messages:
        was_result, is_result = is_result, message["role"] == "tool"
        if is_result:
            content = joined("<tool_response>\n", message["content"], "\n</tool_response>")
            if was_result:
                found[-1]["content"] = joined(found[-1]["content"], "\n", content)
            else:
                found.append({"role": "user", "content": content})
            continue
        plain = dict(message)
        calls = "\n".join(_call_text(call["function"]) for call in plain.pop("tool_calls", None) or ())
        between = "\n" if plain["content"] and calls else ""
        found.append({**plain, "content": joined(plain["content"], between + calls)})
    if tools:
        _describe(found, tools)
    return found


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{OPEN}\n{json.dumps(call, ensure_ascii=False)}\n{CLOSE}"


def _describe(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    prompt = _PROMPT.format(tools=lines, open=OPEN, close=CLOSE)
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = joined(messages[0]["content"], f"\n\n{prompt}")
    else:
        messages.insert(0, {"role": "system", "content": prompt})
