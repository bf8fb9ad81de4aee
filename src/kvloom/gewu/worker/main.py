"""The worker process: `python -m kvloom.gewu.worker.main FD` holds one model until its socket closes.

One thread: it reads orders between two steps and sends the events of each step.
"""

import importlib
import os
import socket
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

from kvloom.checkpoints.footprint import STORED
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ModelError, ServingError
from kvloom.contract.lifecycle import Failed, Loading, Ping, Pong, Ready
from kvloom.contract.messages import Progress
from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import InProcessExecutor
from kvloom.engine.text.tokenizer import load_tokenizer
from kvloom.gewu.codes import shown
from kvloom.gewu.protocol.messages import Abort, Event, Events, Floor, Held, Job, Open, Order, WorkerInfo
from kvloom.gewu.qos import ClassPlanner, Level
from kvloom.gewu.worker.cpushare import CpuShare
from kvloom.processes import childlog, inside
from kvloom.processes.channel import Channel
from kvloom.rank.byte_tokenizer import ByteTokenizer
from kvloom.rank.main import open_runner
from kvloom.rank.pages import release_blocks

_STEP_TOKENS = 64  # tokens of a prefill chunk: an interactive request waits for one at most
_MAX_BATCH = 32
_BLOCK_SIZE = 16  # block size in tokens, for every back end
_LONG_TOKEN = 64  # bytes; covers what a tokenizer drops or merges before it splits
_FINISH = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@dataclass(slots=True)
class _Counts:
    num_prompt: int
    num_output: int = 0


class Worker:
    """Runs an engine for the daemon."""

    def __init__(self, engine: Engine, planner: ClassPlanner, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._longest_token = cache(lambda: max(len(tokenizer.token_bytes(id)) for id in range(vocab_size)))
        self._engine = engine
        self._planner = planner
        self._tokenizer = tokenizer
        self._counts: dict[str, _Counts] = {}
        self._held: dict[str, int] = {}  # as last reported to the daemon
        self._is_asked = False  # whether a ping waits for its answer
        self._early: list[Event] = []  # events of jobs that never reach the engine

    def serve(self, channel: Channel) -> None:
        """Run until the daemon closes the socket, which raises EOFError."""
        while True:
            patience_s = self._patience_s()
            while channel.is_readable(patience_s):
                self._take(order := channel.receive())
                patience_s = 0.0
                if isinstance(order, Job):  # a step between two prompts, so that streams go on
                    break
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
            if self._is_asked:
                self._is_asked = False
                channel.send(Pong())

    def _patience_s(self) -> float | None:
        """Seconds to wait for orders before the next step: for ever without work, 0 while there are steps."""
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
            self._counts.pop(order.key, None)
        elif isinstance(order, Ping):
            self._is_asked = True
            return
        elif isinstance(order, Floor):
            self._planner.floor, self._planner.hard_floor = Level(order.floor), Level(order.hard_floor)
            self._planner.is_dropping, self._planner.is_trimming = order.is_dropping, order.is_trimming
        self._planner.has_steps = True

    def _add(self, job: Job) -> None:
        """Give a job to the engine. One that does not fit into the context ends at once, with "length"."""
        try:
            messages = [{"role": _ROLES.get(role, role), "content": content} for role, content in job.messages]
            text = self._tokenizer.apply_chat_template(messages)
            context = min(job.max_ctx or self._engine.max_seq_len, self._engine.max_seq_len)
            if self._is_endless(text, context):  # tokenising it would delay all others
                self._early.append(Event(job.key, "", "length"))
                return
            prompt = self._tokenizer.encode(text, add_special_tokens=False)
            if len(prompt) >= context:
                self._early.append(Event(job.key, "", "length", len(prompt)))
                return
            params = SamplingParams(
                temperature=job.temperature,
                top_p=job.top_p,
                seed=job.seed,
                stop=job.stop,
                max_tokens=min(job.max_tokens or context, context - len(prompt)),
            )
            answer = tuple(job.answer)
            self._engine.add(Request(job.key, tuple(prompt), params, job.salt, priority=job.level, answer=answer))
            self._counts[job.key] = _Counts(len(prompt), len(answer))
        except BadRequest as error:
            self._early.append(Event(job.key, "", "abort", error=str(error)))

    def _is_endless(self, text: str, context: int) -> bool:
        """Whether the text exceeds the context even if every token is the longest one. Only long texts are checked,
        which are rare.
        """
        return len(text) > context * _LONG_TOKEN and len(text) > context * self._longest_token()

    def _event(self, delta: Delta) -> Event | None:
        if delta.finish_reason is FinishReason.ABORT:
            return None
        counts = self._counts[delta.request_id]
        counts.num_output += len(delta.token_ids)
        if delta.finish_reason is not None:
            del self._counts[delta.request_id]
        finish = _FINISH[delta.finish_reason] if delta.finish_reason else None
        told = counts.num_prompt, delta.num_cached_tokens, counts.num_output
        return Event(delta.request_id, delta.text, finish, *told, token_ids=list(delta.token_ids))


_ROLES = {"developer": "system"}  # chat templates know only the older name


def open_worker(setup: Open, progress: Progress) -> tuple[Worker, WorkerInfo]:
    """Load the model. Raises ServingError."""
    progress(0, 0)
    tokenizer: Tokenizer = ByteTokenizer() if setup.backend == "fake" else load_tokenizer(setup.model)
    config, num_tokens = _sizes(setup)
    runner = open_runner(config, sorted(tokenizer.eos_ids), progress)
    if why := runner.info.lacks.get("generation"):
        raise ModelError(f"{setup.model}: a session answers with text, and this model cannot: {why}")
    planner = ClassPlanner(
        time.monotonic,
        CpuShare().serve,
        lambda blocks, windows: (
            release_blocks(runner.kv_layers, blocks) + release_blocks(runner.window_layers, windows)
        ),
    )
    engine = Engine(config, InProcessExecutor(runner), tokenizer, planner)
    info = runner.info
    facts = WorkerInfo(info.backend, info.weight_bytes, info.kv_bytes, engine.max_seq_len, num_tokens)
    return Worker(engine, planner, tokenizer, info.vocab_size), facts


def _sizes(setup: Open) -> tuple[EngineConfig, int]:
    """The engine's configuration, and the tokens that its KV cache holds. Raises ModelError when these are too few."""
    config = EngineConfig(
        model="" if setup.backend == "fake" else setup.model,
        backend=setup.backend,
        weight_format=STORED,  # a device's memory is short
        max_batch=_MAX_BATCH,
        max_tokens_per_step=_STEP_TOKENS,
    )
    num_tokens, max_seq_len = setup.kv_tokens, setup.kv_tokens
    if setup.backend != "fake":
        config, token_bytes, max_seq_len = _fit(config)
        num_tokens = min(num_tokens, setup.kv_bytes // token_bytes)
    num_blocks = num_tokens // _BLOCK_SIZE
    if num_blocks < 2:
        raise ModelError(f"{setup.kv_bytes} bytes for the KV cache hold fewer than {2 * _BLOCK_SIZE} tokens")
    num_tokens = num_blocks * _BLOCK_SIZE
    return replace(config, num_blocks=num_blocks, max_seq_len=max(2, min(num_tokens, max_seq_len))), num_tokens


def _fit(config: EngineConfig) -> tuple[EngineConfig, int, int]:
    """See fit.py, which imports the back ends."""
    found: tuple[EngineConfig, int, int] = importlib.import_module("kvloom.gewu.worker.fit").fit(config)
    return found


def main() -> None:
    childlog.begin(int(sys.argv[2]))
    inside.begin()
    sock = socket.socket(fileno=os.dup(int(sys.argv[1])))  # the lowest free number: select has a limit
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        channel = Channel(sock, Open)
        setup: Open = channel.receive()
        channel.expect(Order)
        try:
            worker, info = open_worker(setup, lambda done, total: channel.send(Loading(done, total)))
        except ServingError as error:
            channel.send(Failed(shown(str(error))))
            return
        except (BrokenPipeError, ConnectionResetError):  # the daemon has given this model up, or has ended
            raise
        except Exception as error:  # whatever a file caused, the app is told
            traceback.print_exc()
            channel.send(Failed(shown(f"{type(error).__name__}: {error}")))
            return
        channel.send(Ready(info))
        worker.serve(channel)


if __name__ == "__main__":
    main()
