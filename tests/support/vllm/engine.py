"""A small engine around EMSConnector, over the stub of vLLM: steps, allocations and reports in vLLM's order."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from socket import AF_UNIX, socket
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.vllm.stub import (
    Blocks,
    FakeRequest,
    KVConnectorRole,
    Step,
    by_group,
    kv_cache_config,
    new_caches,
    stubbed_vllm,
    vllm_config,
)
from tests.support.waiting import until


def listens(path: str | Path) -> bool:
    """Whether there is an agent behind this socket."""
    with socket(AF_UNIX) as asking:
        return asking.connect_ex(str(path)) == 0


class Engine:
    """A scheduler with one connector and a worker with another for each rank, all in this process."""

    def __init__(
        self, address: str | Path, seed: int, world_size: int = 1, specs: tuple[Any, ...] = (), **changes: Any
    ) -> None:
        caches = kv_cache_config(*specs)
        self.workers, self.caches, shakes = [], [], {}
        self._reports: Counter[tuple[str, str]] = Counter()  # how many workers have reported it
        for rank in range(world_size):
            with stubbed_vllm(rank, world_size) as module:
                worker = module.EMSConnector(vllm_config(address, **changes), KVConnectorRole.WORKER, caches)
                self.caches.append(new_caches(seed + rank, len(caches.kv_cache_groups)))
                worker.register_kv_caches(self.caches[-1])
                shakes[(0, rank)] = worker.get_handshake_metadata()
                self.workers.append(worker)
        with stubbed_vllm() as module:
            config = vllm_config(address, **changes)
            self.scheduler = module.EMSConnector(config, KVConnectorRole.SCHEDULER, caches)
        self.scheduler.set_xfer_handshake_metadata_pp_aware(shakes)
        circuits = [self.scheduler._scheduling.lookup, *(worker._moving.circuit for worker in self.workers)]
        if listens(address):
            until(lambda: all(circuit.is_up for circuit in circuits))

    def matched(self, request: FakeRequest, num_computed: int = 0) -> tuple[int, bool]:
        while True:
            count, is_async = self.scheduler.get_num_new_matched_tokens(request, num_computed)
            if count is not None:
                return count, is_async
            if self.workers[0]._settings.layerwise:
                self.step(Step())  # as vLLM does while requests are queued: workers learn of stages in steps

    def allocate(self, request: FakeRequest, blocks: Blocks, num_external: int) -> None:
        table = SimpleNamespace(get_block_ids=lambda: by_group(blocks))
        self.scheduler.update_state_after_alloc(request, table, num_external)

    def step(self, step: Step, finished: set[str] = frozenset()) -> tuple[set[str], set[str], set[Any]]:
        """Runs one model step: ids whose saves ended on all ranks, ids whose loads ended on all ranks, blocks that
        failed.

        With several groups vLLM has the ids of failed requests instead of blocks.
        """
        metadata = self.scheduler.build_connector_meta(step.output())
        failed: set[int] = set()
        failed_ids: set[str] = set()
        told = []
        for worker in self.workers:
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
            worker.start_load_kv(None)
            for name, cache in self.caches[self.workers.index(worker)].items():
                worker.wait_for_layer_load(name)
                worker.save_kv_layer(name, cache, None)
            worker.wait_for_save()
            results = worker.get_transfer_results(finished)
            self._reports.update(("sent", id) for id in results.finished_sending)
            self._reports.update(("received", id) for id in results.finished_recving)
            failed_ids |= results.failed_recving
            failed |= worker.get_block_ids_with_load_errors()
            told.append(worker.build_connector_worker_meta())
        sent, received = self._take("sent"), self._take("received")
        metas = [meta for meta in told if meta is not None]
        output = SimpleNamespace(
            finished_recving=received,
            invalid_block_ids=failed,
            failed_recving=failed_ids,
            kv_connector_worker_meta=None,
        )
        if metas:
            output.kv_connector_worker_meta = reduce(lambda one, other: one.aggregate(other), metas)
        self.scheduler.update_connector_output(output)
        assert not (failed and failed_ids), "vLLM takes blocks of one group only"
        return sent, received, failed_ids or failed

    def _take(self, kind: str) -> set[str]:
        """Requests that every worker has reported."""
        done = {report for report, count in self._reports.items() if report[0] == kind and count == len(self.workers)}
        for report in done:
            del self._reports[report]
        return {id for _kind, id in done}

    def load(self, request: FakeRequest, blocks: Blocks, num_external: int) -> set[Any]:
        """Loads and waits; returns the blocks, or requests, that failed."""
        self.allocate(request, blocks, num_external)
        failed: set[Any] = set()

        def received() -> set[str]:
            _sent, ids, more = self.step(Step())
            failed.update(more)
            return ids

        assert until(received) == {request.request_id}
        return failed

    def compute(self, request: FakeRequest, blocks: Blocks) -> None:
        """Computes the whole prompt in one step, and waits for its saves until the request's end."""
        self.allocate(request, blocks, 0)
        id = request.request_id
        self.step(Step(new=[(request, blocks, 0)], counts={id: request.num_tokens}))
        self.finish(request)

    def finish(self, request: FakeRequest) -> None:
        is_held, _parameters = self.scheduler.request_finished(request, [])
        if is_held and not self.step(Step(), {request.request_id})[0]:
            until(lambda: self.step(Step())[0])

    def bytes_of(self, block: int, rank: int = 0) -> torch.Tensor:
        """The bytes of the layers of one group, in whichever of them the block is."""
        return torch.stack([cache[:, block] for cache in list(self.caches[rank].values())[:2]])

    def close(self) -> None:
        for connector in (*self.workers, self.scheduler):
            connector.shutdown()


@contextmanager
def engine(socket: Any, seed: int = 1, **changes: Any) -> Iterator[Engine]:
    running = Engine(str(socket), seed, **changes)
    try:
        yield running
    finally:
        running.close()
