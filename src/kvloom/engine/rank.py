"""The rank process, `python -m kvloom.engine.rank FD BACKEND`: loads a model, runs batches until its socket closes."""

import gc
import importlib
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import cast

from kvloom.engine.batch import Batch, LoadAdapter, RankOrder, Runner, UnloadAdapter
from kvloom.engine.config import EngineConfig
from kvloom.engine.errors import BadRequest, ServingError
from kvloom.engine.executor import (
    AdapterLoaded,
    AdapterRefused,
    Channel,
    Done,
    Failed,
    Loading,
    Progress,
    RankMessage,
    RankSetup,
    Ready,
)
from kvloom.engine.kvtier import KvRunner, TieredRunner, open_tier
from kvloom.engine.pages import PagesAhead

_AHEAD_BYTES = 256 << 20  # of the KV cache that nobody has used yet: ten thousand tokens of a small model
OpenRunner = Callable[[EngineConfig, list[int], Progress, int, str], KvRunner]


def open_runner(
    config: EngineConfig, eos_ids: list[int], progress: Progress, rank: int = 0, rendezvous: str = ""
) -> Runner:
    """The runner of `config.backend`. The fake one is opened without importing torch. Raises ServingError."""
    runner = _opener(config.backend)(config, eos_ids, progress, rank, rendezvous)
    if config.kv_tier is None:
        return runner
    memory = replace(runner.kv_memory(config.model), rank=rank, world_size=config.world_size)
    return TieredRunner(runner, open_tier(config.kv_tier, memory))


def _opener(backend: str) -> OpenRunner:
    module = importlib.import_module("kvloom.engine.fake" if backend == "fake" else "kvloom.engine.runner")
    return cast(OpenRunner, module.open_runner)


def serve(sock: socket.socket) -> None:
    """Answer messages until the engine closes the socket. An exception is reported and ends the process."""
    channel = Channel(sock, RankSetup)
    setup: RankSetup = channel.receive()
    channel.expect(RankOrder)
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
    gc.freeze()  # what the model's life long stays is not looked through again
    gc.enable()
    pages = PagesAhead(runner.kv_layers, runner.info.num_blocks, _AHEAD_BYTES)
    channel.send(Ready(runner.info))
    while True:
        order: RankOrder = channel.receive()
        if isinstance(order, Batch):
            pages.use(_highest_block(order))
        try:
            answer = _answer(runner, order)
        except Exception as error:
            traceback.print_exc()
            channel.send(Failed(f"the model failed in a step: {type(error).__name__}: {error}"))
            raise SystemExit(1) from None
        if answer is not None:
            channel.send(answer)
        runner.rest()


def _highest_block(batch: Batch) -> int:
    lists = [work.blocks for work in batch.work] + [load.blocks for load in batch.loads]
    return max((max(blocks) for blocks in lists if blocks), default=0)


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
    """Also `mindieservice_backend_connector`, the documented name; only a server starts it."""
    if len(sys.argv) != 3 or not sys.argv[1].isdecimal():
        sys.exit("a rank is started by its server, with the number of an open socket and the backend's name")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then closes the socket
    gc.disable()  # a fifth of the time that importing torch takes
    _opener(sys.argv[2])  # imports torch while the server reads the tokenizer
    try:
        serve(socket.socket(fileno=int(sys.argv[1])))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


if __name__ == "__main__":
    main()
