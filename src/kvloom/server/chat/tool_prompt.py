"""Tools, calls and results as text, for chat templates that do not show them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvloom.server.chat.content import joined
from kvloom.server.chat.elements import arguments_text
from kvloom.server.chat.form import HERMES, ID, TYPE, CallForm
from kvloom.server.chat.spelling import sorting, spelt
from kvloom.server.chat.values import json_type

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
    """The conversation without tool_calls and role tool: calls become text, results become user messages; the system
    message describes the tools, in hermes form.

    `tools` in the form of chat templates.
    """
    found = results_in_text(calls_in_text(messages, HERMES))
    if tools:
        _describe(found, tools)
    return found


def calls_in_text(messages: Sequence[Mapping[str, Any]], form: CallForm) -> list[dict[str, Any]]:
    """The conversation with each call as the text that the model writes."""
    found = []
    for message in messages:
        plain = dict(message)
        calls = [call["function"] for call in plain.pop("tool_calls", None) or ()]
        text = call_text(form, [(call["name"], call["arguments"]) for call in calls]) if calls else ""
        between = "\n" if plain["content"] and calls else ""
        found.append({**plain, "content": joined(plain["content"], between + text)})
    return found


def results_in_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with the results of calls as messages of the user."""
    found: list[dict[str, Any]] = []
    is_result = False  # whether the message before was a result
    for message in messages:
        was_result, is_result = is_result, message["role"] == "tool"
        if not is_result:
            found.append(dict(message))
            continue
        content = joined("<tool_response>\n", message["content"], "\n</tool_response>")
        if was_result:
            found[-1]["content"] = joined(found[-1]["content"], "\n", content)
        else:
            found.append({"role": "user", "content": content})
    return found


def call_text(form: CallForm, calls: Sequence[tuple[str, Any]]) -> str:
    """Calls as a model of this form writes them. `calls`: the name, and the arguments as an object, or as a text that
    is none.
    """
    texts = [
        f"{form.head}{name}{form.mid}{_arguments_text(form, arguments)}{form.tail}".replace(ID, str(at))
        for at, (name, arguments) in enumerate(calls)
    ]
    if form.is_section:
        return form.begin + form.between.join(texts) + form.end
    return form.between.join(form.begin + text + form.end for text in texts)


def _arguments_text(form: CallForm, arguments: Any) -> str:
    if form.kind not in ("tagged", "elements", "python"):
        return json.dumps(arguments, ensure_ascii=False)
    known = arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
    if form.kind == "elements":
        return arguments_text(form, known)
    members = sorted(known.items(), key=sorting(form))
    if form.kind == "tagged":
        return "".join(
            f"{form.key_begin}{key}{_key_end(form, value)}{spelt(form, value)}{form.value_end}"
            for key, value in members
        )
    return form.comma.join(f"{key}{form.assign}{spelt(form, value)}" for key, value in members)


def _key_end(form: CallForm, value: Any) -> str:
    other = form.other_end.replace(TYPE, json_type(value))
    return form.key_end if isinstance(value, str) or not other else other


def _describe(messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    prompt = _PROMPT.format(tools=lines, open=OPEN, close=CLOSE)
    if messages and messages[0]["role"] == "system":
        messages[0]["content"] = joined(messages[0]["content"], f"\n\n{prompt}")
    else:
        messages.insert(0, {"role": "system", "content": prompt})
