"""Which turns a chat template shows, found by rendering conversations that are known. Pure.

The texts below stand for contents of messages; no template contains them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvloom.contract.errors import BadRequest
from kvloom.server.chat.derive import TOOLS, Render

ROLES = ("system", "developer", "user", "assistant", "tool")
_RULE, _LATER, _ASKED, _AGAIN, _SAID, _MORE = "Skvla", "Skvlb", "Qkvla", "Qkvlb", "Akvla", "Akvlb"
_RESULTS, _VALUES = ("Rkvla", "Rkvlb"), ("kvlva", "kvlvb")
_NAMES = ("kvlfa", "kvlfb")  # of TOOLS
_ROLE = "kvlrole"
_KEY, _RAW = "kvlka", '{"kvlka": "kvlraw'
_LONG_ID, _ID_LENGTH = "call_kvl{}", 9  # Mistral's templates take ids of nine letters alone
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turns:
    """What a template takes. The defaults are those of one that takes everything."""

    has_system: bool = True  # at the beginning
    keeps_system: bool = True  # also where the last message is no user's
    has_later_system: bool = True  # also where it stands later
    has_developer: bool = False  # instead of a system message
    may_repeat: bool = True  # two messages of a user, or of the assistant, one after the other
    may_begin_with_answer: bool = True
    arguments: Literal["object", "text"] = "object"  # of calls
    has_raw_arguments: bool = True  # a text that is no JSON among them
    has_long_ids: bool = True
    has_calls: bool = True
    has_results: bool = True  # messages of the role tool
    has_results_within: bool = False  # they stand in the member `tool_responses` of the message that calls instead
    has_several_calls: bool = True  # in one message
    has_text_with_calls: bool = True
    has_question_after_result: bool = True


def turns_of(render: Render, has_tools: bool) -> Turns:
    """`has_tools`: the template is shown tools too."""
    asking = _Asking(render, has_tools)
    return Turns(**(_plain(asking) | _of_calls(asking)))


def shows_role(render: Render, role: str) -> bool:
    """Whether the template shows messages of a role, at the beginning or later."""
    asking, message = _Asking(render, False), {"role": role, "content": _RULE}
    is_known = asking.shows([message, _user(_ASKED)], _RULE) or asking.shows([_user(_ASKED), message], _RULE)
    return is_known or not asking.shows([_user(_ASKED)], _ASKED)


def short_id(id: str, digest: str) -> str:
    """An id that every template takes: the same, or one made of its digest."""
    return id if len(id) == _ID_LENGTH and id.isalnum() else digest[:_ID_LENGTH]


class _Asking:
    def __init__(self, render: Render, has_tools: bool) -> None:
        self._render, self._tools = render, TOOLS if has_tools else []

    def text(self, messages: Sequence[Message]) -> str:
        """ "" where the template refuses them."""
        try:
            return self._render(messages, self._tools, True)
        except BadRequest:
            return ""

    def shows(self, messages: Sequence[Message], *contents: str) -> bool:
        text = self.text(messages)
        return all(content in text for content in contents)

    def orders(self, messages: Sequence[Message], *contents: str) -> bool:
        """Whether it shows the contents one after the other."""
        text = self.text(messages)
        places = [text.find(content) for content in contents]
        return -1 not in places and places == sorted(places)


def _plain(asking: _Asking) -> dict[str, Any]:
    if not asking.shows([_user(_ASKED)], _ASKED):
        return {}
    has_system = asking.shows([_system(_RULE), _user(_ASKED)], _RULE, _ASKED)
    developer = {"role": "developer", "content": _RULE}
    first = [_system(_RULE)] if has_system else []
    shown = [_RULE] if has_system else []
    later = [*first, _user(_ASKED), _answer(_SAID), _system(_LATER), _user(_AGAIN)]
    has_later = asking.orders(later, _ASKED, _SAID, _LATER, _AGAIN) and asking.shows(later, *shown)
    return {
        "has_system": has_system,
        "keeps_system": asking.shows([*first, _user(_ASKED), _answer(_SAID)], *shown, _SAID),
        "has_later_system": has_later and asking.orders([_user(_ASKED), _system(_LATER)], _ASKED, _LATER),
        "has_developer": not has_system and asking.shows([developer, _user(_ASKED)], _RULE, _ASKED),
        "may_repeat": asking.orders([_user(_ASKED), _user(_AGAIN)], _ASKED, _AGAIN)
        and asking.orders([_user(_ASKED), _answer(_SAID), _answer(_MORE), _user(_AGAIN)], _SAID, _MORE, _AGAIN),
        "may_begin_with_answer": asking.orders([_answer(_SAID), _user(_ASKED)], _SAID, _ASKED),
    }


def _of_calls(asking: _Asking) -> dict[str, Any]:
    """What the template takes of calls and their results."""
    for is_long in (True, False):
        for kind in ("object", "text"):
            call = _Calls(is_long, kind)
            text = asking.text([_user(_ASKED), call.message(1)])
            if _VALUES[0] not in text:  # a call at the end may be shown as one that goes on
                text = asking.text([_user(_ASKED), call.message(1), call.result(0)])
            is_printed = str({_KEY: _VALUES[0]}) in text  # as Python writes a mapping, which is no JSON
            if _VALUES[0] in text and (kind == "text" or not is_printed):
                return {"arguments": kind, "has_long_ids": is_long} | _of_shown_calls(asking, call)
    return {"has_calls": False, "has_results": False}


def _of_shown_calls(asking: _Asking, call: "_Calls") -> dict[str, Any]:
    asked, called = _user(_ASKED), call.message(1)
    raw = call.message(1, raw=_RAW)
    has_results = asking.orders([asked, called, call.result(0)], _VALUES[0], _RESULTS[0])
    several = [asked, call.message(2), call.result(0), call.result(1)]
    result = [call.result(0)] if has_results else []
    is_within = _has_results_within(asking, call, has_results)
    return {
        "has_results_within": is_within,
        "has_raw_arguments": asking.shows([asked, raw], "kvlraw"),
        "has_results": has_results,
        "has_several_calls": asking.shows(several if has_results else several[:2], *_VALUES),
        "has_text_with_calls": not is_within  # the text would stand behind the results
        and asking.shows([asked, {**called, "content": _SAID}, *result], _SAID, _VALUES[0]),
        "has_question_after_result": not has_results
        or asking.orders([asked, called, *result, _user(_AGAIN)], _RESULTS[0], _AGAIN),
    }


def _has_results_within(asking: _Asking, call: "_Calls", has_results: bool) -> bool:
    """Whether it shows results in the message that calls, and knows no role tool: it shows none, or as any other."""
    before, result = [_user(_ASKED), call.message(1)], call.result(0)
    within = {**before[1], "tool_responses": [{"name": _NAMES[0], "response": _RESULTS[0]}]}
    if not asking.shows([before[0], within], _RESULTS[0]):
        return False
    other = asking.text([*before, {**result, "role": _ROLE}])
    return not has_results or (_ROLE in other and other.replace(_ROLE, "tool") == asking.text([*before, result]))


@dataclass(frozen=True, slots=True)
class _Calls:
    """Messages with calls in one form."""

    has_long_ids: bool
    kind: str

    def message(self, count: int, raw: str = "") -> dict[str, Any]:
        calls = [
            {
                "id": self._id(at),
                "type": "function",
                "function": {"name": _NAMES[at], "arguments": raw or self._arguments(at)},
            }
            for at in range(count)
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def result(self, at: int) -> dict[str, Any]:
        name = _NAMES[at]
        return {"role": "tool", "content": _RESULTS[at], "name": name, "tool_call_id": self._id(at)}

    def _id(self, at: int) -> str:
        return _LONG_ID.format(at) + "x" * _ID_LENGTH if self.has_long_ids else f"kvlidaaa{at}"

    def _arguments(self, at: int) -> Any:
        arguments = {_KEY: _VALUES[at]}
        return json.dumps(arguments) if self.kind == "text" else arguments


def _system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _answer(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}
