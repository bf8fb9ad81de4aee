"""The JSON of the ABI, without a daemon: what it accepts, what it refuses and with which word, what it writes."""

import contextlib
import json
import re

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.protocol.jsontext import MAX_CONTAINERS, MAX_DEPTH, read_fields, read_value
from kvloom.gewu.protocol.schema import ROLES, Attributes, Chat, parse_attributes, parse_chat, reply, waiting
from kvloom.gewu.qos import Level

HI = {"role": "user", "content": "hi"}


def attributes(**fields: object) -> Attributes:
    return parse_attributes(json.dumps({"model": "/m", **fields}).encode())


def chat(**fields: object) -> Chat:
    return parse_chat(json.dumps({"messages": [HI], **fields}).encode())


def refused(call, code: Code, said: str) -> None:
    with pytest.raises(Refused, match=f"^{re.escape(said)}") as caught:
        call()
    assert caught.value.code is code


def test_a_path_alone_is_a_session_with_nothing_special():
    assert attributes() == Attributes("/m")


@pytest.mark.parametrize("model", [None, 1, "", "a\0b", "x" * 4096, "é" * 2048])
def test_a_model_is_a_path_that_the_system_can_open(model):
    refused(lambda: attributes(model=model), Code.INVAL, "model: must be a path of fewer than 4096 bytes")


def test_the_longest_path_has_4095_bytes():
    assert attributes(model="x" * 4095).model == "x" * 4095


@pytest.mark.parametrize(
    ("settings", "max_ctx"),
    [
        ({"max_ctx": 1}, 1),
        ('{"max_ctx": "9", "backend": "NPU"}', 9),
        ({"backend": None}, None),
        ({}, None),
        (None, None),
    ],
)
def test_settings_are_an_object_or_a_text_that_holds_one(settings, max_ctx):
    assert attributes(eval_settings=settings).max_ctx == max_ctx


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        (3, Code.INVAL, "eval_settings: must be an object"),
        ("", Code.INVAL, "eval_settings: must be an object"),
        ("{", Code.INVAL, "not a JSON object of the right kind"),
        ({"backend": 1}, Code.INVAL, "backend: must be a string"),
        ({"backend": "abacus"}, Code.NOSYS, "backend 'abacus' is not one of auto, cpu"),
        ({"max_ctx": 0}, Code.INVAL, "max_ctx: must be an integer of at least 1"),
        ({"max_ctx": True}, Code.INVAL, "max_ctx: must be an integer"),
        ({"max_ctx": 2**63}, Code.INVAL, "max_ctx: must be an integer"),
        ({"max_ctx": "9" * 21}, Code.INVAL, "max_ctx: must be an integer"),
        ({"max_ctx": "-1"}, Code.INVAL, "max_ctx: must be an integer"),
    ],
)
def test_wrong_settings_are_named(settings, code, said):
    refused(lambda: attributes(eval_settings=settings), code, said)


@pytest.mark.parametrize(
    ("qos", "level"),
    [(None, None), (0, Level.BACKGROUND), ("5", Level.USER_INTERACTIVE), ("Utility", Level.UTILITY)],
)
def test_a_level_is_a_number_or_a_name(qos, level):
    assert attributes(qos=qos).level is level


@pytest.mark.parametrize("qos", [6, "6", "urgent", -1, 1.5, True, []])
def test_a_level_that_is_none_is_refused(qos):
    refused(lambda: attributes(qos=qos), Code.INVAL, "qos: ")


@pytest.mark.parametrize(("keep_alive_s", "read"), [(0, 0.0), (2.5, 2.5), ("60", 60.0), (1e9, 1e9)])
def test_a_time_to_keep_a_model_is_a_number_of_seconds(keep_alive_s, read):
    assert attributes(keep_alive_s=keep_alive_s).keep_alive_s == read


@pytest.mark.parametrize("keep_alive_s", [-1, 1e9 + 1, True, "soon", []])
def test_a_time_that_is_none_is_refused(keep_alive_s):
    refused(lambda: attributes(keep_alive_s=keep_alive_s), Code.INVAL, "keep_alive_s: ")


def test_a_request_is_greedy_whole_and_of_open_length_unless_it_says_otherwise():
    assert chat() == Chat((("user", "hi"),))
    asked = chat(stream=True, max_tokens="3", temperature=0.5, top_p=1, seed=0, stop="x")
    assert asked == Chat((("user", "hi"),), True, 3, 0.5, 1.0, 0, ("x",))
    assert chat(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize("role", ROLES)
def test_every_role_may_speak_and_the_assistant_not_last(role):
    assert chat(messages=[{"role": role, "content": ""}, HI]).messages[0] == (role, "")
    if role == "assistant":
        refused(lambda: chat(messages=[HI, {"role": role, "content": ""}]), Code.INVAL, "messages: the last one")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"messages": None}, "messages: Expected `array`, got `null`"),
        ({"messages": []}, "messages: must be a non-empty array"),
        ({"messages": ["hi"]}, "messages: Expected `object`"),
        ({"messages": [{"role": "user"}]}, "messages: Object missing required field `content`"),
        ({"messages": [{"role": "system", "content": "hi"}]}, "role: must be one of developer, user, assistant"),
        ({"stream": 1}, "stream: must be a boolean or null"),
        ({"max_tokens": 0}, "max_tokens: must be an integer of at least 1"),
        ({"max_tokens": 1.5}, "max_tokens: must be an integer"),
        ({"temperature": -0.1}, "temperature: must be a number between 0 and 100"),
        ({"temperature": 101}, "temperature: must be a number between 0 and 100"),
        ({"top_p": 0}, "top_p: must be above 0"),
        ({"top_p": 1.01}, "top_p: must be a number between 0 and 1"),
        ({"seed": -1}, "seed: must be an integer of at least 0"),
        ({"stop": ""}, "stop: must be a non-empty string or an array of them"),
        ({"stop": ["x", 1]}, "stop: must be a non-empty string"),
        ({"stop": {}}, "stop: must be a non-empty string"),
        ({"seed": "x" * 70_000}, "seed: is longer than 64 KiB"),
    ],
)
def test_a_wrong_field_of_a_request_is_named(fields, said):
    refused(lambda: chat(**fields), Code.INVAL, said)


def test_a_request_without_messages_is_refused():
    refused(lambda: parse_chat(b"{}"), Code.INVAL, "messages: must be a non-empty array")


@pytest.mark.parametrize(("size", "is_read"), [(1 << 16, True), ((1 << 16) + 1, False)])
def test_a_value_of_no_known_type_has_64_kib_at_most(size, is_read):
    value = msgspec.Raw(b'"' + b"x" * (size - 2) + b'"')
    if is_read:
        assert read_value("seed", value) == "x" * (size - 2)
    else:
        refused(lambda: read_value("seed", value), Code.INVAL, "seed: is longer")
        assert read_value("text", value, str) == "x" * (size - 2), "a text is bounded by its frame"


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'{"model": "\xff"}', b'\xef\xbb\xbf{"model": "/m"}', b'{"x": "\\ud83e"}']
)
def test_what_is_no_json_object_is_refused(data):
    refused(lambda: parse_attributes(data), Code.INVAL, "not a JSON object of the right kind")


def nested(opening: str, closing: str, depth: int) -> bytes:
    return ('{"model": "/m", "x": ' + opening * depth + "1" + closing * depth + "}").encode()


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a": ', "}")])
def test_json_is_64_deep_at_most_wherever_it_is(opening, closing):
    assert parse_attributes(nested(opening, closing, MAX_DEPTH - 1)) == Attributes("/m")
    refused(lambda: parse_attributes(nested(opening, closing, MAX_DEPTH)), Code.INVAL, "nested deeper than 64")


def test_brackets_in_texts_are_no_depth():
    text = '[{"' * 1000
    assert chat(messages=[{"role": "user", "content": text}]).messages == (("user", text),)


@pytest.mark.parametrize(("count", "is_read"), [(MAX_CONTAINERS - 2, True), (MAX_CONTAINERS - 1, False)])
def test_arrays_and_objects_are_counted(count, is_read):
    data = b'{"model": "/m", "x": [' + b",".join([b"[]"] * count) + b"]}"
    if is_read:
        assert parse_attributes(data) == Attributes("/m")
    else:
        refused(lambda: parse_attributes(data), Code.INVAL, "holds more than 16384 arrays and objects")


def test_strings_are_counted_where_there_are_many_arrays():
    data = b'{"x": [' + b"[]," * MAX_DEPTH + b",".join([b'""'] * (1 << 18)) + b"]}"
    refused(lambda: parse_attributes(data), Code.INVAL, "holds more than")


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
names = st.sampled_from(
    ["model", "eval_settings", "qos", "keep_alive_s", "messages", "stream", "seed", "stop", "top_p"]
)


@given(st.dictionaries(names, json_values, max_size=5))
def test_whatever_an_app_sends_is_read_or_refused(fields):
    for parse in (parse_attributes, parse_chat):
        with contextlib.suppress(Refused):
            assert parse(json.dumps(fields).encode())


class Fields(msgspec.Struct):
    known: msgspec.Raw = msgspec.Raw()


@given(json_values, json_values)
def test_a_field_holds_what_was_sent_whatever_stands_beside_it(value, other):
    data = json.dumps({"other": other, "known": value}).encode()
    assert read_value("known", read_fields(data, Fields).known) == msgspec.json.decode(json.dumps(value))


def test_a_reply_has_both_keys_and_raw_utf8():
    assert reply("é", None) == '{"message":{"role":"assistant","content":"é"},"finish_reason":null}'.encode()
    ended = json.loads(reply("", "abort", (Code.NOMEM, "memory is short")))
    assert ended["error"] == {"code": int(Code.NOMEM), "message": "memory is short"}


@pytest.mark.parametrize("why", ["memory is short", None])
def test_a_request_that_waits_is_told_why_without_text(why):
    said = json.loads(waiting(why))
    assert said == {"message": {"role": "assistant", "content": ""}, "finish_reason": None, "waiting": why}
