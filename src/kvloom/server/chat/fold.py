"""Conversations as a chat template can show them: what it lacks is said in turns that it has. Pure.

A message's content is a chat.content.Content; calls are in OpenAI's form.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvloom.server.chat.content import joined
from kvloom.server.chat.tools import parsed_arguments
from kvloom.server.chat.turns import Turns, short_id
from kvloom.server.serving.notes import note

_GAP = "\n\n"  # between what was two messages
_KEPT = ("reasoning_content", "reasoning", "thinking")
Message = dict[str, Any]


def folded(messages: Sequence[Mapping[str, Any]], turns: Turns) -> list[Message]:
    """The same conversation for a template of these `turns`. Calls and results that it does not show are texts by now,
    see tool_prompt.py.
    """
    found = [_without_empty(message, turns) for message in messages]
    if not turns.has_long_ids:
        found = _with_short_ids(found)
    found = _with_systems(found, turns)
    if not turns.has_question_after_result:
        found = _with_questions_in_results(found)
    if not turns.may_repeat:
        found = _without_neighbours(found)
    found = [each for index, message in enumerate(found) for each in _answers_of(message, index, turns)]
    if not turns.has_several_calls:
        found = _with_single_calls(found)
    if turns.has_results_within:
        found = _with_results_within(found)
    return found if turns.may_begin_with_answer else _with_question_first(found)


def _without_empty(message: Mapping[str, Any], turns: Turns) -> Message:
    """The message without fields that say nothing, in a role that the template has."""
    found = {name: value for name, value in message.items() if name != "tool_calls" or value}
    if found["role"] == "developer" and not turns.has_developer:
        found["role"] = "system"
    if "tool_calls" in found:
        found["tool_calls"] = [_with_arguments(call, turns) for call in found["tool_calls"]]
    return found


def _with_arguments(call: Mapping[str, Any], turns: Turns) -> Message:
    """The call with arguments in the template's form. Those that are no object are shown as they are."""
    function = call["function"]
    arguments = function["parsed"] if "parsed" in function else parsed_arguments(function["arguments"])
    is_object = isinstance(arguments, Mapping)
    if not is_object and not turns.has_raw_arguments:
        arguments, is_object = {"arguments": arguments}, True
    if is_object and turns.arguments == "text":
        given = function["arguments"]
        arguments = given if isinstance(given, str) and given else json.dumps(arguments, ensure_ascii=False)
    others = {name: value for name, value in function.items() if name != "parsed"}
    return {**call, "function": {**others, "arguments": arguments}}


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Ids of calls in a form that every template takes; results without an id answer the calls in their order."""
    found, waiting, num_calls = list[Message](), list[str](), 0
    for message in messages:
        if message["role"] == "tool":
            id = message.get("tool_call_id")
            short = _short(id) if id else waiting[0] if waiting else _short("")
            waiting = [other for other in waiting if other != short]
            message = {**message, "tool_call_id": short}
        elif calls := message.get("tool_calls"):
            ids = [_short(call.get("id") or f"call {num_calls + at}") for at, call in enumerate(calls)]
            num_calls += len(calls)
            waiting = ids
            message = {**message, "tool_calls": [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]}
        found.append(message)
    return found


def _short(id: str) -> str:
    return short_id(id, hashlib.sha256(id.encode()).hexdigest())


def _with_systems(messages: Sequence[Message], turns: Turns) -> list[Message]:
    """System messages where the template takes them: those at the beginning as one, later ones in the next user's
    message.
    """
    has_system = turns.has_system and (turns.keeps_system or _ends_with_user(messages, turns))
    if has_system and turns.has_later_system:
        return list(messages)
    num_first = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    first, rest = messages[:num_first], messages[num_first:]
    found, waiting = list[Message](), list[Any]()
    if has_system and first:
        found.append({**first[0], "content": _together([message["content"] for message in first])})
    else:
        waiting = [message["content"] for message in first]
    for message in rest:
        if message["role"] == "system" and not turns.has_later_system:
            waiting.append(message["content"])
            continue
        if waiting and message["role"] == "user":
            message = {**message, "content": _together([*waiting, message["content"]])}
            waiting = []
        elif waiting and message["role"] == "assistant":
            found.append({"role": "user", "content": _together(waiting)})
            waiting = []
        found.append(message)
    return [*found, {"role": "user", "content": _together(waiting)}] if waiting else found


def _ends_with_user(messages: Sequence[Message], turns: Turns) -> bool:
    """Whether the last message will be a user's."""
    before = next((each["role"] for each in reversed(messages) if each["role"] not in ("user", "system")), "")
    is_asked = messages[-1]["role"] in ("user", "system")
    return is_asked and (turns.has_question_after_result or before != "tool")


def _with_questions_in_results(messages: Sequence[Message]) -> list[Message]:
    """What a user says behind the results of calls is said in the last of them."""
    found = list[Message]()
    for message in messages:
        if found and message["role"] == "user" and found[-1]["role"] == "tool":
            found[-1] = {**found[-1], "content": _together([found[-1]["content"], message["content"]])}
        else:
            found.append(message)
    return found


def _without_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Messages of a user, or of the assistant, that follow each other are one."""
    found = list[Message]()
    for message in messages:
        if not found or message["role"] != found[-1]["role"] or message["role"] not in ("user", "assistant"):
            found.append(message)
            continue
        last = found[-1]
        both = {**last, **message, "content": _together([last["content"], message["content"]])}
        both |= {name: _together([last[name], message[name]]) for name in _KEPT if last.get(name) and message.get(name)}
        calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
        found[-1] = both | ({"tool_calls": calls} if calls else {})
    return found


def _answers_of(message: Message, index: int, turns: Turns) -> list[Message]:
    """An answer of a text and calls as two, where the template would leave out the text."""
    if turns.has_text_with_calls or not message.get("tool_calls") or not message["content"]:
        return [message]
    if not turns.may_repeat:
        note(f"messages[{index}].content is beside tool calls, where the model's chat template leaves it out")
        return [message]
    said = {name: value for name, value in message.items() if name != "tool_calls"}
    called = {name: value for name, value in message.items() if name not in _KEPT}
    return [said, {**called, "content": ""}]


def _with_single_calls(messages: Sequence[Message]) -> list[Message]:
    """Several calls of one message as several messages, each before its result."""
    found = list[Message]()
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        end = next((i for i in range(at, len(messages)) if messages[i]["role"] != "tool"), len(messages))
        results, at = list(messages[at:end]), end
        for number, call in enumerate(calls):
            own = message if not number else {"role": message["role"], "content": ""}
            found.append({**own, "tool_calls": [call]})
            own_at = next((i for i, one in enumerate(results) if one.get("tool_call_id") == call.get("id")), 0)
            found += results[own_at : own_at + 1]
            results = results[:own_at] + results[own_at + 1 :]
        found += results
    return found


def _with_results_within(messages: Sequence[Message]) -> list[Message]:
    """Results, and the answer that follows them, in the message that calls."""
    found = list[Message]()
    for message in messages:
        last = found[-1] if found and found[-1].get("tool_calls") else {}
        is_answer = message["role"] == "assistant" and not message.get("tool_calls")
        if last and not last["content"] and message["role"] == "tool" and isinstance(message["content"], str):
            results = last.get("tool_responses", [])
            calls = last["tool_calls"]
            own = next((call for call in calls if call.get("id") == message.get("tool_call_id")), None)
            own = own or (calls[len(results)] if len(results) < len(calls) else None)
            name = own["function"]["name"] if own else message.get("name") or ""
            found[-1] = {**last, "tool_responses": [*results, {"name": name, "response": message["content"]}]}
        elif is_answer and last.get("tool_responses") and not last["content"]:
            found[-1] = {**last, "content": message["content"]}
        else:
            found.append(message)
    return found


def _with_question_first(messages: Sequence[Message]) -> list[Message]:
    """With a user's empty message before an answer that begins the conversation."""
    at = next((i for i, message in enumerate(messages) if message["role"] != "system"), len(messages))
    if at == len(messages) or messages[at]["role"] != "assistant":
        return list(messages)
    return [*messages[:at], {"role": "user", "content": ""}, *messages[at:]]


def _together(contents: Sequence[Any]) -> Any:
    """The contents one after the other, a blank line between them; empty ones say nothing."""
    found: list[Any] = []
    for content in contents:
        if content:
            found += [_GAP, content] if found else [content]
    return joined(*found) if found else ""
