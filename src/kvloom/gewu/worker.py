"""The worker process: `python -m kvloom.gewu.worker FD` holds one model until its socket closes.

One thread: it reads orders between two steps and sends what each step brought.
"""

import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from kvloom.engine.config import EngineConfig
from kvloom.engine.detok import Vocabulary
from kvloom.engine.engine import Engine
from kvloom.engine.errors import BadRequest, ModelError, ServingError
from kvloom.engine.executor import Channel, InProcessExecutor
from kvloom.engine.fake import ByteTokenizer
from kvloom.engine.pages import release_blocks
from kvloom.engine.rank import open_runner
from kvloom.engine.request import Delta, FinishReason, Request, SamplingParams
from kvloom.engine.tokenizer import load_tokenizer
from kvloom.engine.weights.checkpoint import open_checkpoint
from kvloom.gewu.cpushare import CpuShare
from kvloom.gewu.messages import Abort, Event, Events, Failed, Floor, Held, Job, Open, Order, Ready
from kvloom.gewu.qos import ClassPlanner, Level

_STEP_TOKENS = 64  # a prefill chunk: an interactive request waits no longer than one
_MAX_BATCH = 32
_BLOCK_SIZE = 16  # tokens, of every back end
_KV_ITEM_BYTES = 4  # the reference back end keeps keys and values as float32
_FINISH = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class ChatTokenizer(Vocabulary, Protocol):
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def apply_chat_template(self, messages: list[dict[str, Any]]) -> str: ...


@dataclass(slots=True)
class _Counts:
    num_prompt: int
    num_output: int = 0


class Worker:
    """Runs an engine for the daemon."""

    def __init__(self, engine: Engine, planner: ClassPlanner, tokenizer: ChatTokenizer) -> None:
        self._engine = engine
        self._planner = planner
        self._tokenizer = tokenizer
        self._counts: dict[str, _Counts] = {}
        self._held: dict[str, int] = {}  # as the daemon knows it
        self._early: list[Event] = []  # of jobs that never reach the engine

    def serve(self, channel: Channel) -> None:
        """Until the daemon closes the socket, which raises EOFError."""
        while True:
            patience_s = self._patience_s()
            while channel.is_readable(patience_s):
                self._take(channel.receive())
                patience_s = 0.0
            deltas = self._engine.start_step()
            self._engine.finish_step()
            deltas += self._engine.take_deltas()
            events = self._early + [event for delta in deltas if (event := self._event(delta)) is not None]
            self._early = []
            held = self._planner.held_tokens()
            if held != self._held:
                self._held = held
                channel.send(Held(held))
            if events:
                channel.send(Events(events))

    def _patience_s(self) -> float | None:
        """How long to wait for orders before the next step: for ever without work, not at all while steps are made."""
        if self._early:
            return 0.0
        if not self._engine.has_work:
            return None
        return 0.0 if self._planner.has_steps else self._planner.wait_s()

    def _take(self, order: Order) -> None:
        if isinstance(order, Job):
            self._add(order)
        elif isinstance(order, Abort):
            self._engine.abort(order.key)
        elif isinstance(order, Floor):
            self._planner.floor, self._planner.hard_floor = Level(order.floor), Level(order.hard_floor)
            self._planner.is_dropping, self._planner.is_trimming = order.is_dropping, order.is_trimming
        self._planner.has_steps = True

    def _add(self, job: Job) -> None:
        """Give a job to the engine. One that does not fit into the context ends at once, with "length"."""
        try:
            messages = [{"role": _ROLES.get(role, role), "content": content} for role, content in job.messages]
            prompt = self._tokenizer.encode(self._tokenizer.apply_chat_template(messages), add_special_tokens=False)
            if len(prompt) >= self._engine.max_seq_len:
                self._early.append(Event(job.key, "", "length", len(prompt)))
                return
            params = SamplingParams(
                temperature=job.temperature,
                top_p=job.top_p,
                seed=job.seed,
                stop=job.stop,
                max_tokens=job.max_tokens,
            )
            self._engine.add(Request(job.key, tuple(prompt), params, job.salt, priority=job.level))
            self._counts[job.key] = _Counts(len(prompt))
        except BadRequest as error:
            self._early.append(Event(job.key, "", "abort", error=str(error)))

    def _event(self, delta: Delta) -> Event | None:
        counts = self._counts[delta.request_id]
        counts.num_output += len(delta.token_ids)
        if delta.finish_reason is not None:
            del self._counts[delta.request_id]
        if delta.finish_reason is FinishReason.ABORT:
            return None
        finish = _FINISH[delta.finish_reason] if delta.finish_reason else None
        return Event(
            delta.request_id, delta.text, finish, counts.num_prompt, delta.num_cached_tokens, counts.num_output
        )


_ROLES = {"developer": "system"}  # chat templates know the older word


def open_worker(setup: Open) -> tuple[Worker, Ready]:
    """Load the model. Raises ServingError."""
    tokenizer: ChatTokenizer = ByteTokenizer() if setup.backend == "fake" else load_tokenizer(setup.model)
    config = EngineConfig(
        model="" if setup.backend == "fake" else setup.model,
        backend=setup.backend,
        max_batch=_MAX_BATCH,
        max_tokens_per_step=_STEP_TOKENS,
    )
    num_blocks, max_seq_len = _sizes(setup)
    config = replace(config, num_blocks=num_blocks, max_seq_len=max_seq_len)
    runner = open_runner(config, sorted(tokenizer.eos_ids), lambda done, total: None)
    planner = ClassPlanner(
        time.monotonic,
        CpuShare().serve,
        lambda blocks: release_blocks(runner.kv_layers, blocks),
    )
    engine = Engine(config, InProcessExecutor(runner), tokenizer, planner)
    info = runner.info
    ready = Ready(info.backend, info.weight_bytes, info.kv_bytes, engine.max_seq_len, num_blocks * info.block_size)
    return Worker(engine, planner, tokenizer), ready


def _sizes(setup: Open) -> tuple[int, int]:
    """KV blocks and context length that the memory for KV holds. Raises ModelError when it holds next to nothing."""
    if setup.backend == "fake":
        return setup.kv_tokens // _BLOCK_SIZE, min(setup.max_seq_len or setup.kv_tokens, setup.kv_tokens)
    spec = open_checkpoint(setup.model).spec
    token_bytes = 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * _KV_ITEM_BYTES
    num_blocks = min(setup.kv_tokens, setup.kv_bytes // token_bytes) // _BLOCK_SIZE
    if num_blocks < 2:
        raise ModelError(f"{setup.kv_bytes} bytes for the KV cache hold fewer than {2 * _BLOCK_SIZE} tokens")
    max_seq_len = min(num_blocks * _BLOCK_SIZE, spec.max_seq_len, setup.max_seq_len or spec.max_seq_len)
    return num_blocks, max(2, max_seq_len)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the daemon, which then closes the socket
    sock = socket.socket(fileno=int(sys.argv[1]))
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        channel = Channel(sock, Open)
        setup: Open = channel.receive()
        channel.expect(Order)
        try:
            worker, ready = open_worker(setup)
        except ServingError as error:
            channel.send(Failed(str(error)))
            return
        channel.send(ready)
        worker.serve(channel)


if __name__ == "__main__":
    main()
