"""An app's calls, or the failure of its model's process, do not affect another app."""

import json
import os
import signal

import pytest

from kvloom.gewu.codes import Code
from tests.gewu.test_hostile_models import children_of
from tests.support.gewu.daemons import make_model
from tests.support.waiting import until


def say(num_chars: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": "x" * num_chars}]


@pytest.mark.parametrize("is_small_first", [True, False])
def test_max_ctx_is_a_session_s_own(is_small_first, start_daemon, start_client, model):
    daemon = start_daemon(None, "--backend", "fake")
    one, other = start_client(daemon), start_client(daemon)
    wishes = [{"eval_settings": {"max_ctx": 64}}, {}]
    first, second = (one.create(model, **wishes[not is_small_first]), other.create(model, **wishes[is_small_first]))
    small, large = (first, second) if is_small_first else (second, first)
    narrow, wide = (one, other) if is_small_first else (other, one)
    (only,) = narrow.ask(small, messages=say(200), stream=False)
    assert (only["finish_reason"], only["message"]["content"]) == ("length", "")
    (whole,) = wide.ask(large, messages=say(200), max_tokens=20, stream=False)
    assert whole["message"]["content"]
    until(lambda: all(not found["requests"] for found in daemon.status()["sessions"]))
    assert daemon.model()["loads"] == 1


def test_an_answer_ends_where_the_session_s_context_does(start_daemon, start_client, model):
    daemon = start_daemon(None, "--backend", "fake")
    client = start_client(daemon)
    session = client.create(model, eval_settings={"max_ctx": 60})
    context = client.submit(session, messages=say(10), max_tokens=500)
    client.call("started", context)
    (found,) = daemon.status()["sessions"][0]["requests"] or [None]
    assert client.wait(context)[-1]["finish_reason"] in ("length", "stop")
    if found is not None:
        assert found["prompt_tokens"] + found["output_tokens"] <= 60


def test_a_larger_context_than_the_others_is_had_when_nobody_else_is_served(start_daemon, start_client, tmp_path):
    daemon = start_daemon({"rate": 20})
    client, neighbour = start_client(daemon), start_client(daemon)
    model = make_model(tmp_path / "model", max_position_embeddings=20_000)
    busy = neighbour.create(model)
    until(lambda: daemon.model()["state"] == "ready")
    chat = {"messages": say(4), "max_tokens": 12_000}
    assert neighbour.call("submit", busy, json.dumps(chat), 77)[0] == Code.NOMEM
    large = client.create(model, eval_settings={"max_ctx": 16_000})
    running = neighbour.submit(busy)
    neighbour.call("started", running)
    context = client.submit(large, **chat)
    behind = neighbour.submit(neighbour.create(model))
    assert neighbour.wait(running)[-1]["finish_reason"] == "stop"
    assert client.wait(context)[-1]["finish_reason"] == "stop"
    assert neighbour.wait(behind)[-1]["finish_reason"] == "stop"
    assert (daemon.model()["loads"], daemon.model()["kv_tokens"]) == (2, 16_000)


def test_a_frozen_model_process_is_ended_and_each_request_goes_on_in_another(start_daemon, start_client, model):
    daemon = start_daemon(None, "--backend", "fake", GEWU_WORKER_SILENCE_S="5")
    client = start_client(daemon)
    session = client.create(model)
    client.ask(session, max_tokens=3)
    os.kill(daemon.model()["pid"], signal.SIGSTOP)
    contexts = [client.submit(session), client.submit(client.create(model))]
    for context in contexts:
        assert client.wait(context)[-1]["finish_reason"] in ("stop", "length")
    assert daemon.model()["loads"] == 2
    assert client.ask(session, max_tokens=3)[-1]["finish_reason"] in ("stop", "length")


def test_a_model_process_that_freezes_while_it_loads_is_ended(start_daemon, start_client, tmp_path):
    daemon = start_daemon(None, "--backend", "fake", GEWU_WORKER_SILENCE_S="1")
    client = start_client(daemon)
    known: set[int] = set()

    def new_workers() -> set[int]:
        return set(children_of(daemon.process.pid, "worker")) - known

    for number in range(20):  # again if a worker has loaded its model before it is stopped
        context = client.submit(client.create(make_model(tmp_path / f"model{number}")))
        for worker in until(new_workers):
            os.kill(worker, signal.SIGSTOP)
        (*_, last) = client.wait(context)
        if "error" in last:
            break
        known.update(new_workers())
    assert last["error"]["message"] == "the model process gave no sign of life while it loaded the model"


def test_a_paused_request_learns_that_it_waits_and_why(start_daemon, start_client, model):
    daemon = start_daemon(None, "--backend", "fake")
    cpu = daemon.psi_file.parent / "cpu"
    cpu.write_text("some avg10=90.00 avg60=0 avg300=0 total=1\n")
    client = start_client(daemon)
    session, interactive = client.create(model, qos="background"), client.create(model, qos="user_interactive")
    until(lambda: daemon.status()["paused"])
    context = client.submit(session, max_tokens=3)
    until(lambda: daemon.status()["sessions"][0]["requests"][0]["waits_for"] == "the processor is busy")
    assert "waiting" not in json.dumps(client.ask(interactive, max_tokens=3))
    cpu.write_text("some avg10=0.00 avg60=0 avg300=0 total=1\n")
    first, *_, last = client.wait(context)
    assert first == {
        "message": {"role": "assistant", "content": ""},
        "finish_reason": None,
        "waiting": "the processor is busy",
    }
    assert last["finish_reason"] in ("stop", "length")
    assert client.ask(session, max_tokens=3, stream=False)[0]["message"]["content"]
