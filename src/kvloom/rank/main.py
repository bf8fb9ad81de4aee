"""The rank process: loads a model, then runs batches until its socket closes. For its arguments see rankargs.py."""

import contextlib
import gc
import importlib
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from kvloom.checkpoints.fingerprint import stamp
from kvloom.contract.capacity import AHEAD
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest, ModelError, ServingError
from kvloom.contract.lifecycle import Failed, Loading, Ready
from kvloom.contract.messages import (
    AdapterLoaded,
    AdapterRefused,
    Batch,
    Done,
    LoadAdapter,
    Progress,
    RankMessage,
    RankOrder,
    RankSetup,
    Runner,
    UnloadAdapter,
)
from kvloom.engine.link.rankargs import parse
from kvloom.processes import childlog, inside
from kvloom.processes.channel import Channel
from kvloom.rank.machine import is_out_of_memory, trim_heap
from kvloom.rank.pages import PagesAhead
from kvloom.rank.tier.tier import KvRunner, with_tier

OpenRunner = Callable[[EngineConfig, list[int], Progress, int, str], KvRunner]


def open_runner(
    config: EngineConfig, eos_ids: list[int], progress: Progress, rank: int = 0, rendezvous: str = ""
) -> Runner:
    """The runner of `config.backend`. Raises ServingError."""
    files = stamp(config.model)
    runner = _opener(config.backend)(config, eos_ids, progress, rank, rendezvous)
    if config.kv_tier is None:
        return runner
    memory = replace(runner.kv_memory(config.model), rank=rank, world_size=config.world_size)
    if stamp(config.model) != files:  # otherwise blocks would be named after weights that did not compute them
        raise ModelError(f"{config.model}: its files have changed while the model was loaded; load it again")
    return with_tier(runner, config.kv_tier, memory)


def _opener(backend: str) -> OpenRunner:
    module = importlib.import_module("kvloom.rank.fake" if backend == "fake" else "kvloom.rank.loading")
    return cast(OpenRunner, module.open_runner)


def serve(sock: socket.socket) -> None:
    """Answer messages until the engine closes the socket. Any exception is reported and ends the process."""
    channel = Channel(sock, RankSetup)
    setup: RankSetup = channel.receive()
    channel.expect(RankOrder)
    if setup.config.rank_cores:
        pin(setup.config.rank_cores[setup.rank])
    try:
        runner = open_runner(
            setup.config,
            setup.eos_ids,
            lambda done, total: channel.send(Loading(done, total)),
            setup.rank,
            setup.rendezvous,
        )
    except ServingError as error:
        channel.send(Failed(str(error)))
        return
    trim_heap()
    gc.freeze()  # objects as old as the model are never rescanned
    gc.enable()
    pages = [
        PagesAhead(layers, count, AHEAD)
        for layers, count in (
            (runner.kv_layers, runner.info.num_blocks),
            (runner.window_layers, runner.info.num_window_blocks),
        )
        if count
    ]
    channel.send(Ready(runner.info))
    while True:
        order: RankOrder = channel.receive()
        if isinstance(order, Batch):
            for each, block in zip(pages, _highest_blocks(order), strict=False):
                each.use(block)
        try:
            answer = _answer(runner, order)
        except Exception as error:  # whatever it is, the engine is told before the rank ends
            channel.send(Failed(_last_words(error)))
            if not is_out_of_memory(error):
                traceback.print_exc()
            raise SystemExit(1) from None
        if answer is not None:
            channel.send(answer)
        if isinstance(order, Batch) and order.release:
            for each in pages:
                each.forget()
        runner.prepare_next()


def _last_words(error: Exception) -> str:
    if is_out_of_memory(error):
        return f"the model ran out of memory in a step; lower kv_cache_bytes (npuMemSize) ({error})"
    return f"the model failed in a step: {type(error).__name__}: {error}"


def pin(cores: Sequence[int]) -> None:
    """Run every thread of this process, and so every later one, on these cores only."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)


def _highest_blocks(batch: Batch) -> tuple[int, int]:
    """Of all tokens, and of a window's."""
    lists = [work.blocks for work in batch.work if work.blocks] + [load.blocks for load in batch.loads if load.blocks]
    windows = [work.windows for work in batch.work if work.windows]
    return max(map(max, lists), default=0), max(map(max, windows), default=0)


def _answer(runner: Runner, order: RankOrder) -> RankMessage | None:
    if isinstance(order, UnloadAdapter):
        runner.unload_adapter(order.id)
        return None
    if isinstance(order, LoadAdapter):
        try:
            return AdapterLoaded(runner.load_adapter(order.id, order.path))
        except BadRequest as error:
            return AdapterRefused(error.field, error.problem)
    return Done(runner.run(order))


def main() -> None:
    """Also `mindieservice_backend_connector`, the documented name. Started by a server only."""
    try:
        given = parse(sys.argv[1:])
    except ValueError as error:
        sys.exit(str(error))
    childlog.begin(given.level)
    inside.begin()
    gc.disable()  # a fifth of the time that imports take
    _opener("fake" if given.is_mock else "")  # imports while the server reads the tokenizer
    try:
        serve(socket.socket(fileno=given.socket))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
