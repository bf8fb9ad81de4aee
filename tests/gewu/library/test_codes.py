"""The codes that Create and Submit return through the C ABI, for each row of the table of errors."""

import json
import os
import subprocess
import sys

import pytest

from kvloom.gewu.codes import Code
from tests.support.gewu.daemons import make_model
from tests.support.waiting import until

INVALID = 0xFFFFFFFF
MESSAGES = [{"role": "user", "content": "hi"}]


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


BAD_ATTRIBUTES = {
    "empty": "",
    "not JSON": "{",
    "an array": "[]",
    "no model": "{}",
    "model not a string": '{"model": 1}',
    "model empty": '{"model": ""}',
    "model with NUL": '{"model": "/tmp\\u0000"}',
    "path absent": '{"model": "/nowhere/at/all"}',
    "not a model folder": '{"model": "/proc/self"}',
    "not a model file": '{"model": "/proc/self/cmdline"}',
    "byte order mark": '\ufeff{"model": "MODEL"}',
    "lone surrogate": '{"model": "MODEL", "x": "\\ud83e"}',
    "too deep": '{"model": "MODEL", "x": ' + nested(65) + "}",
    "qos out of range": '{"model": "MODEL", "qos": 6}',
    "qos unknown": '{"model": "MODEL", "qos": "urgent"}',
    "max_ctx zero": '{"model": "MODEL", "eval_settings": {"max_ctx": 0}}',
    "eval_settings a number": '{"model": "MODEL", "eval_settings": 3}',
    "keep_alive_s negative": '{"model": "MODEL", "keep_alive_s": -1}',
}
GOOD_ATTRIBUTES = {
    "model alone": '{"model": "MODEL"}',
    "trailing slash": '{"model": "MODEL/"}',
    "unknown fields": '{"model": "MODEL", "x": {"y": [1]}}',
    "last of two models": '{"model": 7, "model": "MODEL"}',
    "settings as an object": '{"model": "MODEL", "eval_settings": {"backend": "knpu", "max_ctx": 2048}}',
    "settings as a string": '{"model": "MODEL", "eval_settings": "{\\"backend\\": \\"npu\\", \\"max_ctx\\": \\"9\\"}"}',
    "qos by number": '{"model": "MODEL", "qos": "5"}',
    "qos by name": '{"model": "MODEL", "qos": "user_interactive"}',
    "deep enough": '{"model": "MODEL", "x": ' + nested(62) + "}",
}


@pytest.mark.parametrize("attributes", BAD_ATTRIBUTES.values(), ids=BAD_ATTRIBUTES)
def test_create_refuses_bad_attributes(attributes, client, model):
    assert client.call("create", attributes.replace("MODEL", str(model))) == [Code.INVAL, INVALID]


@pytest.mark.parametrize("attributes", GOOD_ATTRIBUTES.values(), ids=GOOD_ATTRIBUTES)
def test_create_accepts(attributes, client, model):
    error, session = client.call("create", attributes.replace("MODEL", str(model)))
    assert error == Code.OK
    assert client.call("destroy", session) == Code.OK


def test_create_refuses_an_unknown_back_end_or_architecture(client, model, tmp_path):
    attributes = {"model": str(model), "eval_settings": {"backend": "abacus"}}
    assert client.call("create", json.dumps(attributes)) == [Code.NOSYS, INVALID]
    strange = make_model(tmp_path / "strange", architectures=["AbacusForCausalLM"])
    assert client.call("create", json.dumps({"model": str(strange)})) == [Code.NOSYS, INVALID]


def test_create_without_a_daemon(daemon, tmp_path, model):
    code = "from kvloom.gewu import Session; import sys; Session(sys.argv[1])"
    environ = {**daemon.environ, "GEWU_SOCKET": str(tmp_path / "none")}
    command = [sys.executable, "-c", code, str(model)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert "kvloom.gewu.codes.Refused" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give up its rights for the app alone")
def test_create_refuses_what_the_caller_cannot_read(daemon, tmp_path):
    """The daemon, which runs as root here, could read the file; the app cannot."""
    hidden = make_model(tmp_path / "hidden" / "model")
    (tmp_path / "hidden").chmod(0)
    code = """
import ctypes, os, sys
from kvloom.gewu.session import load_library
library = load_library()
ctypes.CDLL(None).prctl(24, 1)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE
ctypes.CDLL(None).prctl(24, 2)
header = (ctypes.c_uint32 * 2)(0x20080522, 0)
ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)())
sys.exit(library.OH_QoS_GewuCreateSession(sys.argv[1].encode()).error - 200)
"""
    command = [sys.executable, "-c", code, json.dumps({"model": str(hidden)})]
    done = subprocess.run(command, env=daemon.environ, check=False)
    (tmp_path / "hidden").chmod(0o700)
    assert done.returncode + 200 == Code.NOPERM


BAD_REQUESTS = {
    "not JSON": "{",
    "empty": "",
    "no messages": {},
    "messages not an array": {"messages": {}},
    "messages empty": {"messages": []},
    "message not an object": {"messages": ["hi"]},
    "no role": {"messages": [{"content": "hi"}]},
    "unknown role": {"messages": [{"role": "system", "content": "hi"}]},
    "content missing": {"messages": [{"role": "user"}]},
    "content null": {"messages": [{"role": "user", "content": None}]},
    "the last is the assistant's": {"messages": [*MESSAGES, {"role": "assistant", "content": "yes"}]},
    "stream a string": {"messages": MESSAGES, "stream": "true"},
    "stream a number": {"messages": MESSAGES, "stream": 1},
    "max_tokens zero": {"messages": MESSAGES, "max_tokens": 0},
    "temperature negative": {"messages": MESSAGES, "temperature": -1},
    "top_p zero": {"messages": MESSAGES, "top_p": 0},
    "stop empty": {"messages": MESSAGES, "stop": [""]},
}
GOOD_REQUESTS = {
    "messages alone": {"messages": MESSAGES},
    "stream null": {"messages": MESSAGES, "stream": None},
    "unknown fields": {"type": "ChatComplete", "messages": [{"role": "user", "content": "hi", "name": 1}]},
    "all roles": {"messages": [{"role": role, "content": ""} for role in ("developer", "user", "assistant", "user")]},
    "sampling": {"messages": MESSAGES, "max_tokens": "3", "temperature": 0.5, "top_p": 1, "seed": 3, "stop": "x"},
}


@pytest.fixture(scope="module")
def session(client, model):
    handle = client.create(model)
    yield handle
    assert client.call("destroy", handle) == Code.OK


@pytest.mark.parametrize("request_", BAD_REQUESTS.values(), ids=BAD_REQUESTS)
def test_submit_refuses(request_, client, session):
    text = request_ if isinstance(request_, str) else json.dumps(request_)
    assert client.call("submit", session, text, 0) == [Code.INVAL, INVALID]


@pytest.mark.parametrize("request_", GOOD_REQUESTS.values(), ids=GOOD_REQUESTS)
def test_submit_accepts_and_a_request_ends_once(request_, client, session):
    context = 1000 + list(GOOD_REQUESTS.values()).index(request_)
    assert client.call("submit", session, json.dumps(request_), context)[0] == Code.OK
    (reply,) = client.wait(context)
    assert reply["message"]["role"] == "assistant"
    assert reply["finish_reason"] == ("length" if "max_tokens" in request_ else "stop")


def test_replies_of_a_stream(client, session):
    *deltas, last = client.ask(session)
    assert [reply["finish_reason"] for reply in deltas] == [None] * len(deltas)
    assert last["finish_reason"] == "stop"
    (whole,) = client.ask(session, stream=False)
    assert "".join(reply["message"]["content"] for reply in [*deltas, last]) == whole["message"]["content"]


def test_text_is_raw_utf8_cut_at_characters(start_daemon, start_client, model):
    tokens = ["喵🤖", "é", '"\\\n']
    daemon = start_daemon({"tokens": tokens})
    client = start_client(daemon)
    session = client.create(model)
    assert [reply["message"]["content"] for reply in client.ask(session)] == [*tokens, ""]
    assert client.ask(session, stream=False)[0]["message"]["content"] == "".join(tokens)


def test_the_service_takes_512_requests_in_all(start_daemon, start_client, model):
    daemon = start_daemon({"load_s": 60})
    client = start_client(daemon)
    text = json.dumps({"messages": MESSAGES})
    for _ in range(8):
        session = client.create(model)
        assert {client.call("submit", session, text, 1)[0] for _ in range(64)} == {Code.OK}
    assert client.call("submit", client.create(model), text, 1) == [Code.NOMEM, INVALID]
    assert until(lambda: len(daemon.status()["sessions"]) == 9)
