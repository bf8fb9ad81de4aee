"""When a model's process dies: which requests go to the next one, in what state, and which end. Scripted processes."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom.contract.errors import BadRequest, ModelError
from kvloom.gewu.codes import Code
from kvloom.gewu.prober.probe import Found
from kvloom.gewu.protocol.messages import Abort, Job, Listeners, Open, Order, WorkerInfo
from kvloom.gewu.protocol.schema import Chat
from kvloom.gewu.qos import Level
from kvloom.gewu.service.ledger import Ledger
from kvloom.gewu.service.models import Models, Outcomes
from kvloom.gewu.service.sessions import Phase, Request, Session, Sessions, batch_group
from kvloom.gewu.service.settings import Settings, read_settings

CHAT = Chat((("user", "hello"),), max_tokens=20)


def started(id: int, level: Level = Level.DEFAULT, num_tokens: int = 0) -> Request:
    request = Request(Session(1, id, "m", None), id, CHAT, level, phase=Phase.STARTED)
    request.answer = list(range(num_tokens))
    return request


# -- which requests may run together


def test_all_go_together_unless_a_process_died_of_one():
    requests = [started(1), started(2), started(3)]
    assert batch_group(requests, {requests[0].key}, Level.BACKGROUND) == requests


def test_suspects_go_alone_the_highest_class_first_and_others_wait_for_them():
    low, high, other = started(1), started(2, Level.USER_INTERACTIVE), started(3, Level.USER_INTERACTIVE)
    assert not any(request.repute.accuse(0) for request in (low, high))
    requests = [low, high, other]
    assert batch_group(requests, set(), Level.BACKGROUND) == [high]
    assert batch_group(requests, {low.key}, Level.BACKGROUND) == [low], "who has begun goes on"
    high.answer += [1, 2]
    assert batch_group(requests, {high.key}, Level.BACKGROUND) == [low]
    low.answer += [1, 2]
    assert batch_group(requests, {low.key}, Level.BACKGROUND) == requests


def test_nobody_waits_for_a_suspect_that_may_not_run():
    paused, other = started(1, Level.BACKGROUND), started(2)
    paused.repute.accuse(0)
    assert batch_group([paused, other], {paused.key}, Level.DEFAULT) == [other]
    assert batch_group([paused, other], {other.key}, Level.BACKGROUND) == [paused]


# -- processes that die


class Host:
    def __init__(self, on: Listeners) -> None:
        self.info = WorkerInfo("fake", 0, 1 << 20, 4096, 4096)
        self.pid, self.held_tokens = None, {}
        self.on = on
        self.jobs: list[Job] = []
        self.called_back: list[str] = []

    def send(self, order: Order) -> None:
        if isinstance(order, Job):
            self.jobs.append(order)
        elif isinstance(order, Abort):
            self.called_back.append(order.key)

    def watch(self, interval_s: float) -> None: ...

    async def close(self) -> None: ...


class World:
    """One model; `hosts` are its processes so far, `refusals` what opening the next ones raises."""

    has_processes = False

    def __init__(self, tmp_path: Path, patience_s: float = 120.0, budget_bytes: int | None = None) -> None:
        self.hosts: list[Host] = []
        self.refusals: list[Exception] = []
        self.failed: list[tuple[int, Code, str]] = []
        self.opened = asyncio.Event()
        self.sessions = Sessions()
        settings = Settings(
            tmp_path / "socket", budget_bytes, crash_patience_s=patience_s, psi_file=tmp_path / "memory"
        )
        (tmp_path / "memory").write_text("")
        on = Outcomes(lambda events: None, self.fail)
        self.models = Models(self, settings, self.sessions, Ledger(False, list), on)
        self.identity = "m"
        self.admit(Found("m", "model", 0, 1, 0, 4096))

    def admit(self, found: Found) -> None:
        files: Any = SimpleNamespace(identity=lambda: self.identity, close=lambda: None)
        self.models.admit(found, files, None, Level.DEFAULT)

    async def __call__(self, setup: Open, files: object, on: Listeners) -> Any:
        if self.refusals:
            raise self.refusals.pop(0)
        self.hosts.append(Host(on))
        self.opened.set()
        return self.hosts[-1]

    def fail(self, requests: list[Request], code: Code, why: str) -> None:
        for request in requests:
            if request.phase is not Phase.ENDED:
                self.sessions.end(request)
                self.failed.append((request.id, code, why))

    def submit(self, id: int, level: Level = Level.DEFAULT) -> Request:
        session = Session(1, id, "m", None)
        self.sessions.create(session)
        request = Request(session, id, CHAT, level, seed=100 + id)
        self.models.reserve(request)
        self.sessions.submit(session, request)
        self.sessions.start_next(session)
        self.models.start(request)
        return request

    async def process(self, number: int) -> Host:
        while len(self.hosts) <= number or self.models._models["m"].host is None:
            await asyncio.sleep(0)
        return self.hosts[number]

    def hear(self, request: Request, *tokens: int) -> None:
        request.answer += tokens
        self.models.progressed(request)


def play(tmp_path: Path, scene: Callable[[World], Awaitable[None]], **fields: Any) -> None:
    async def main() -> None:
        world = World(tmp_path, **fields)
        await asyncio.wait_for(scene(world), 20)
        await world.models.close()

    asyncio.run(main())


def keys(host: Host) -> list[tuple[str, list[int], int | None]]:
    return [(job.key, job.answer, job.seed) for job in host.jobs]


def test_the_next_process_gets_each_answer_as_far_as_it_was_told_one_after_the_other(tmp_path):
    async def scene(world: World) -> None:
        first, second = world.submit(1), world.submit(2)
        host = await world.process(0)
        assert keys(host) == [("1.1.1", [], 101), ("1.2.2", [], 102)]
        world.hear(first, 7, 8, 9)
        host.on.death("it died")
        third = world.submit(3)
        host = await world.process(1)
        assert keys(host) == [("1.1.1", [7, 8, 9], 101)]
        world.hear(first, 10)
        assert len(host.jobs) == 1
        world.hear(first, 11)
        assert (keys(host)[1:], host.called_back) == ([("1.2.2", [], 102)], ["1.1.1"])
        world.hear(second, 1, 2)
        assert keys(host)[2:] == [("1.1.1", [7, 8, 9, 10, 11], 101), ("1.3.3", [], 103)]
        world.hear(first, 12)
        assert (len(host.jobs), len(host.called_back)) == (4, 1)
        assert third.repute.num_crashes == 0
        assert world.failed == []

    play(tmp_path, scene)


def test_what_two_processes_die_of_ends_and_the_others_go_on(tmp_path):
    async def scene(world: World) -> None:
        poison, other = world.submit(1, Level.USER_INTERACTIVE), world.submit(2)
        (await world.process(0)).on.death("it died")
        host = await world.process(1)
        assert [job.key for job in host.jobs] == [poison.key]
        host.on.death("it died again")
        assert [(id, code) for id, code, _ in world.failed] == [(1, Code.FAULT)]
        assert world.failed[0][2].startswith("it died again; the model's process died twice")
        assert [job.key for job in (await world.process(2)).jobs] == [other.key]

    play(tmp_path, scene)


@pytest.mark.parametrize(("patience_s", "num_hosts"), [(120.0, 2), (0.0, 1)])
def test_a_process_that_cannot_be_started_is_tried_again_as_long_as_patience_lasts(tmp_path, patience_s, num_hosts):
    async def scene(world: World) -> None:
        request = world.submit(1)
        host = await world.process(0)
        world.refusals = [ModelError("no room")]
        host.on.death("it died")
        if num_hosts == 2:
            assert [job.key for job in (await world.process(1)).jobs] == [request.key]
        else:
            while not world.failed:
                await asyncio.sleep(0)
            assert world.failed == [(1, Code.FAULT, "no room")]
        assert len(world.hosts) == num_hosts

    play(tmp_path, scene, patience_s=patience_s)


def test_a_load_that_fails_for_no_reason_of_the_model_ends_its_requests(tmp_path):
    async def scene(world: World) -> None:
        world.refusals = [RuntimeError("can't start new thread")]
        world.submit(1)
        while not world.failed:
            await asyncio.sleep(0)
        assert world.failed == [(1, Code.FAULT, "the service failed; its log says more")]
        request = world.submit(2)
        assert [job.key for job in (await world.process(0)).jobs] == [request.key]

    play(tmp_path, scene)


def test_files_that_have_changed_meanwhile_end_the_answers_at_once(tmp_path):
    async def scene(world: World) -> None:
        world.submit(1)
        host = await world.process(0)
        world.identity = "another"
        host.on.death("it died")
        while not world.failed:
            await asyncio.sleep(0)
        assert "the model's files were changed" in world.failed[0][2]

    play(tmp_path, scene)


def test_files_that_change_while_they_are_loaded_are_named_as_the_reason(tmp_path):
    async def scene(world: World) -> None:
        class Changing(ModelError):
            def __init__(self) -> None:
                super().__init__("cut short")
                world.identity = "another"

        world.refusals = [Changing]  # type: ignore[list-item]
        world.submit(1)
        while not world.failed:
            await asyncio.sleep(0)
        assert "the model's files were changed" in world.failed[0][2]

    play(tmp_path, scene)


def test_a_model_that_nobody_waits_for_is_not_started_again(tmp_path):
    async def scene(world: World) -> None:
        (await world.process(0)).on.death("it died")
        await asyncio.sleep(0)
        assert world.models.status()["models"][0]["state"] == "absent"

    play(tmp_path, scene)


def test_a_model_that_is_unloaded_while_it_waits_for_memory_leaves_the_one_that_goes_to_its_end(tmp_path):
    async def scene(world: World) -> None:
        host, begun, may_end, ended = await world.process(0), asyncio.Event(), asyncio.Event(), []

        async def close() -> None:
            begun.set()
            await may_end.wait()
            ended.append(host)

        host.close = close  # type: ignore[method-assign]
        world.admit(Found("n", "a larger model", 8192, 1, 0, 4096))  # the first one goes for it
        await begun.wait()
        closing = asyncio.create_task(world.models.close())
        await asyncio.sleep(0)
        may_end.set()
        await closing
        assert ended == [host]

    play(tmp_path, scene, budget_bytes=8192 + 1024)


@pytest.mark.parametrize("text", ["-1", "1e10", "nan", "inf", "long"])
@pytest.mark.parametrize("variable", ["GEWU_CRASH_PATIENCE_S", "GEWU_IDLE_UNLOAD_S", "GEWU_WORKER_SILENCE_S"])
def test_times_have_bounds(variable: str, text: str):
    with pytest.raises(BadRequest, match=f"{variable}: must be a number of seconds between"):
        read_settings({}, environ={variable: text})


def test_no_silence_at_all_would_end_every_model_process():
    with pytest.raises(BadRequest, match=r"GEWU_WORKER_SILENCE_S: .* between 0\.1 and"):
        read_settings({}, environ={"GEWU_WORKER_SILENCE_S": "0"})


@pytest.mark.parametrize(("given", "backend"), [("torch", "reference"), ("MOCK", "fake"), ("cpu", "cpu")])
def test_the_daemons_backends_have_the_names_that_kvloom_serve_takes(given, backend):
    assert read_settings({}, given, {}).backend == backend
    with pytest.raises(BadRequest, match=r"backend: must be one of default, auto, cpu, torch, .*, got 'vllm'"):
        read_settings({}, "vllm", {})
