"""A host without a model, for tests (GEWU_FAKE_ENGINE): answers with given tokens at a given rate, in the daemon."""

import asyncio
from pathlib import Path

import msgspec

from kvloom.contract.errors import ModelError
from kvloom.gewu.modelfiles import ModelFiles
from kvloom.gewu.protocol.messages import Abort, Event, Host, Job, Listeners, Open, Order, WorkerInfo

_MAX_SEQ_LEN = 4096
_HOLD_S = 0.01  # pause between two turns
_TOKENS = ("LLM ", "is ", "a ", "model.", "\n", "It ", "predicts ", "tokens", ".")


class FakeSettings(msgspec.Struct, forbid_unknown_fields=True):
    """The JSON of GEWU_FAKE_ENGINE."""

    tokens: list[str] = msgspec.field(default_factory=lambda: list(_TOKENS))
    rate: float = 0.0  # tokens a second; 0 = as fast as the loop turns
    load_s: float = 0.0
    error: str = ""  # the error that loading fails with
    hold: str = ""  # a path: while that file exists, answers do not end


class FakeHost:
    """Implements Host. Every job runs at the full rate; classes make no difference."""

    def __init__(self, settings: FakeSettings, setup: Open, on: Listeners) -> None:
        self.info = WorkerInfo("fake", 0, setup.kv_bytes, _MAX_SEQ_LEN, setup.kv_tokens)
        self.pid: int | None = None
        self.held_tokens: dict[str, int] = {}  # there is no KV cache
        self._settings = settings
        self._on = on
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def send(self, order: Order) -> None:
        if isinstance(order, Job):
            task = asyncio.get_running_loop().create_task(self._answer(order))
            self._tasks[order.key] = task
            task.add_done_callback(lambda _: self._tasks.pop(order.key, None))
        elif isinstance(order, Abort) and order.key in self._tasks:
            self._tasks[order.key].cancel()

    def watch(self, interval_s: float) -> None:
        pass

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()

    async def _answer(self, job: Job) -> None:
        tokens = self._settings.tokens[: job.max_tokens]
        num_prompt = sum(len(content) for _, content in job.messages)
        delay_s = 1 / self._settings.rate if self._settings.rate else 0.0
        for count, token in enumerate(tokens, 1):
            await asyncio.sleep(delay_s)
            self._on.events([Event(job.key, token, None, num_prompt, 0, count)])
        while self._settings.hold and Path(self._settings.hold).exists():
            await asyncio.sleep(_HOLD_S)
        finish = "stop" if len(tokens) == len(self._settings.tokens) else "length"
        self._on.events([Event(job.key, "", finish, num_prompt, 0, len(tokens))])


class FakeOpener:
    """Implements Opener."""

    has_processes = False

    def __init__(self, settings: FakeSettings) -> None:
        self._settings = settings
        self.pids: list[int] = []

    async def __call__(self, setup: Open, files: ModelFiles, on: Listeners) -> Host:
        await asyncio.sleep(self._settings.load_s)
        if self._settings.error:
            raise ModelError(self._settings.error)
        return FakeHost(self._settings, setup, on)
