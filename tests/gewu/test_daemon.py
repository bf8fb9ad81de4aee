"""Models come and go: sharing, idle unload, admission, failures, the death of each process."""

import itertools
import json
import os
import signal
from pathlib import Path

import pytest

from kvloom.gewu.codes import Code
from tests.support.gewu.daemons import make_model
from tests.support.waiting import until

MIB = 1 << 20


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While this file exists, a fake engine that was given its path ends no answer."""
    return tmp_path / "hold"


def test_sessions_and_paths_share_one_load(start_daemon, start_client, model, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(model)
    daemon = start_daemon({"rate": 500})
    first, second = start_client(daemon), start_client(daemon)
    for i in range(100):
        first.create((model, f"{model}/", link)[i % 3])
    second.ask(second.create(os.path.relpath(model)))
    assert (daemon.model()["loads"], daemon.model()["sessions"]) == (1, 101)


def test_an_alias_stands_for_a_path(start_daemon, start_client, model):
    daemon = start_daemon({}, "--alias", f"/data/storage={model.parent}")
    client = start_client(daemon)
    client.create(f"/data/storage/{model.name}")
    assert client.call("create", json.dumps({"model": f"/data/storagex/{model.name}"}))[0] == Code.INVAL


def test_a_session_survives_idle_unload_and_loads_again(start_daemon, start_client, model):
    daemon = start_daemon({}, GEWU_IDLE_UNLOAD_S="0.2")
    client = start_client(daemon)
    session = client.create(model)
    first = client.ask(session)
    until(lambda: daemon.model()["state"] == "absent")
    assert daemon.model()["bytes"] == 0
    assert client.ask(session) == first
    assert daemon.model()["loads"] == 2
    client.call("destroy", session)
    until(lambda: daemon.status()["models"] == [])


def test_a_session_may_ask_for_its_model_to_be_kept(start_daemon, start_client, model, tmp_path):
    daemon = start_daemon({}, GEWU_IDLE_UNLOAD_S="0.1")
    client = start_client(daemon)
    client.create(model, keep_alive_s=60)
    client.create(model)  # without keep_alive_s
    until(lambda: daemon.model()["state"] == "ready")
    client.ask(client.create(make_model(tmp_path / "other")))  # used last, but unloaded first
    states = until(lambda: (found := [model["state"] for model in daemon.status()["models"]]).count("absent") and found)
    assert states == ["ready", "absent"]


def test_low_classes_load_at_the_first_request(start_daemon, start_client, model):
    daemon = start_daemon({})
    client = start_client(daemon)
    session = client.create(model, qos="background")
    assert daemon.model()["loads"] == 0
    client.ask(session)
    assert daemon.model()["loads"] == 1


def test_a_request_takes_the_level_of_its_thread(start_daemon, start_client, model, hold):
    hold.touch()
    daemon = start_daemon({"hold": str(hold)})
    client = start_client(daemon)
    of_thread, explicit = client.create(model), client.create(model, qos="utility")
    client.call("level", 5)
    client.submit(of_thread)
    client.submit(explicit)
    found = [session["requests"][0]["qos"] for session in daemon.status()["sessions"]]
    assert found == ["user_interactive", "utility"]


def test_what_does_not_fit_is_refused_at_once(start_daemon, start_client, tmp_path):
    daemon = start_daemon({}, GEWU_MEM_BUDGET="500M")
    client = start_client(daemon)
    huge = make_model(tmp_path / "huge", 600 * MIB)
    assert client.call("create", json.dumps({"model": str(huge)}))[0] == Code.NOMEM
    assert daemon.status()["models"] == []


def test_a_request_whose_kv_cache_finds_no_room_is_refused_at_once(start_daemon, start_client, tmp_path):
    daemon = start_daemon({"rate": 5}, GEWU_MEM_BUDGET="300M")
    client = start_client(daemon)
    path = make_model(tmp_path / "model", 100 * MIB)  # 200 MiB hold KV of 1,600 tokens if the shape is unknown
    session, other = client.create(path), client.create(path)
    until(lambda: daemon.model()["state"] == "ready")
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert client.call("submit", session, json.dumps(chat | {"max_tokens": 1601}), 1)[0] == Code.NOMEM
    long = [{"role": "user", "content": "word " * 1100}]
    assert client.call("submit", other, json.dumps({"messages": long}), 2)[0] == Code.NOMEM
    first, second = client.submit(session, max_tokens=1600), client.submit(other, max_tokens=1600)  # they take turns
    assert client.wait(first)[-1]["finish_reason"] == client.wait(second)[-1]["finish_reason"] == "stop"


def test_a_request_that_would_load_what_no_longer_fits_is_refused_at_once(start_daemon, start_client, tmp_path, hold):
    daemon = start_daemon({"hold": str(hold)}, GEWU_MEM_BUDGET="500M", GEWU_IDLE_UNLOAD_S="0.2")
    client = start_client(daemon)
    one, two = (make_model(tmp_path / name, 300 * MIB) for name in ("one", "two"))
    first = client.create(one)
    until(lambda: daemon.model()["loads"] and daemon.model()["state"] == "absent")
    hold.touch()
    context = client.submit(client.create(two))
    chat = json.dumps({"messages": [{"role": "user", "content": "hi"}]})
    assert client.call("submit", first, chat, 1)[0] == Code.NOMEM
    hold.unlink()
    client.wait(context)
    assert client.ask(first)[-1]["finish_reason"] == "stop"


def test_an_idle_model_makes_room(start_daemon, start_client, tmp_path, hold):
    daemon = start_daemon({"hold": str(hold)}, GEWU_MEM_BUDGET="500M")
    client = start_client(daemon)
    one, two = (make_model(tmp_path / name, 300 * MIB) for name in ("one", "two"))
    first = client.create(one)
    until(lambda: daemon.model()["state"] == "ready")
    hold.touch()
    context = client.submit(first)
    assert client.call("create", json.dumps({"model": str(two)}))[0] == Code.NOMEM  # busy, of the same class
    hold.unlink()
    client.wait(context)
    second = client.create(two)
    client.ask(second)
    states = {Path(model["path"]).name: model["state"] for model in daemon.status()["models"]}
    assert states == {"one": "absent", "two": "ready"}
    assert daemon.status()["memory"]["evictions"] == 1
    client.ask(first)


def test_a_higher_class_takes_the_place_of_a_lower_one(start_daemon, start_client, tmp_path, hold):
    hold.touch()
    daemon = start_daemon({"hold": str(hold)}, GEWU_MEM_BUDGET="500M")
    client = start_client(daemon)
    one, two = (make_model(tmp_path / name, 300 * MIB) for name in ("one", "two"))
    context = client.submit(client.create(one, qos="background"))
    client.call("started", context)
    client.create(two, qos="user_interactive")
    (*_, last) = client.wait(context)
    assert (last["finish_reason"], last["error"]["code"]) == ("abort", Code.NOMEM)


def test_pressure_unloads_what_is_idle_and_at_last_gives_background_up(
    start_daemon, start_client, model, tmp_path, hold
):
    hold.touch()
    daemon = start_daemon({"hold": str(hold)}, GEWU_IDLE_UNLOAD_S="60")
    daemon.psi_file.write_text("some avg10=0 total=0\nfull avg10=0 total=0\n")
    client = start_client(daemon)
    client.create(make_model(tmp_path / "idle"))
    background = client.submit(client.create(model, qos="background"))
    until(lambda: [m["state"] for m in daemon.status()["models"]] == ["ready", "ready"])
    stalled_us = itertools.count(900_000, 900_000)

    def is_unloaded_by_a_growing_stall() -> bool:
        total = next(stalled_us)
        daemon.psi_file.write_text(f"some avg10=9 total={total}\nfull avg10=9 total={total}\n")
        return daemon.status()["models"][0]["state"] == "absent"

    until(is_unloaded_by_a_growing_stall)
    assert daemon.status()["memory"]["pressure"] == 2
    assert daemon.status()["paused"]["below"] == "default"
    (*_, last) = client.wait(background)
    assert (last["finish_reason"], last["error"]["code"]) == ("abort", Code.NOMEM)
    refused = client.call("create", json.dumps({"model": str(make_model(tmp_path / "more")), "qos": 0}))
    assert refused[0] == Code.NOMEM


def test_when_loading_fails_each_request_ends_once_and_the_session_lives(start_daemon, start_client, model):
    daemon = start_daemon({"error": "no such layer", "load_s": 0.2})
    client = start_client(daemon)
    session = client.create(model)
    contexts = [client.submit(session) for _ in range(3)]
    for context in contexts:
        (only,) = client.wait(context)
        assert only["finish_reason"] == "abort"
        assert only["error"] == {"code": Code.FAULT, "message": "no such layer"}
    (only,) = client.ask(session)
    assert only["finish_reason"] == "abort"
    assert daemon.model()["loads"] >= 2


def test_when_an_app_is_killed_its_sessions_go(start_daemon, start_client, model):
    daemon = start_daemon({"rate": 10})
    client = start_client(daemon)
    for _ in range(5):
        client.submit(client.create(model))
    client.process.kill()
    until(lambda: daemon.status()["sessions"] == [])


@pytest.mark.usefixtures("really_started")
def test_a_worker_answers_and_its_death_is_a_pause(start_daemon, start_client, model):
    daemon = start_daemon(None, "--backend", "fake")
    client = start_client(daemon)
    session = client.create(model)
    (*deltas, last) = client.ask(session, max_tokens=40)
    assert last["finish_reason"] in ("stop", "length")
    (whole,) = client.ask(session, max_tokens=40, stream=False)
    assert whole["message"]["content"] == "".join(reply["message"]["content"] for reply in [*deltas, last])
    os.kill(daemon.model()["pid"], signal.SIGSTOP)
    contexts = [client.submit(session, max_tokens=40) for _ in range(3)]
    os.kill(daemon.model()["pid"], signal.SIGKILL)
    for context in contexts:
        replies = client.wait(context)
        assert "".join(reply["message"]["content"] for reply in replies) == whole["message"]["content"]
        assert replies[-1]["finish_reason"] == last["finish_reason"]
    assert client.ask(session, max_tokens=40)[-1]["finish_reason"] == last["finish_reason"]
    assert daemon.model()["loads"] == 2


def test_a_worker_that_dies_in_the_middle_of_answers_is_a_pause_in_them(start_daemon, start_client, model):
    daemon = start_daemon(None, "--backend", "fake")
    client = start_client(daemon)
    chats = [{"max_tokens": 600, "stop": ["never said"]}, {"max_tokens": 600, "temperature": 0.8, "seed": 3}]
    chats += [{"max_tokens": 500, "temperature": 0.8, "seed": 4, "stream": False}]
    sessions = [client.create(model) for _ in chats]
    want = [client.ask(session, **chat) for session, chat in zip(sessions, chats, strict=True)]
    contexts = [client.submit(session, **chat) for session, chat in zip(sessions, chats, strict=True)]
    client.call("started", contexts[0])
    os.kill(daemon.model()["pid"], signal.SIGKILL)
    for context, replies in zip(contexts, want, strict=True):
        found = client.wait(context)
        assert text_of(found) == text_of(replies)
        assert found[-1]["finish_reason"] == replies[-1]["finish_reason"]
    assert daemon.model()["loads"] == 2


def text_of(replies: list[dict]) -> str:
    return "".join(reply["message"]["content"] for reply in replies)


def test_unloading_ends_the_worker_process(start_daemon, start_client, model):
    daemon = start_daemon(None, "--backend", "fake", GEWU_IDLE_UNLOAD_S="0.2")
    client = start_client(daemon)
    client.ask(client.create(model), max_tokens=3)
    pid = daemon.model()["pid"]
    until(lambda: daemon.model()["state"] == "absent")
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_a_second_daemon_on_the_same_socket_is_refused(start_daemon, daemon):
    with pytest.raises(AssertionError, match="daemon has ended"):
        start_daemon({}, GEWU_SOCKET=str(daemon.socket), GEWU_FAKE_ENGINE="1").start()


def test_the_socket_is_the_user_s_alone(daemon):
    assert daemon.socket.stat().st_mode & 0o777 == 0o600
