"""Run by an interpreter with LMCache: its storage manager over EMS. Arguments: socket, model_id, "store" or "fetch"."""

import sys
import time

import torch
from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager

NUM_CHUNKS = 24
SHAPE, DTYPE = torch.Size([2, 4, 256, 64]), torch.bfloat16


def manager_on(socket: str, model_id: str) -> StorageManager:
    plugin = PluginL2AdapterConfig.from_dict(
        {
            "module_path": "ems.integration.lmcache",
            "class_name": "EmsL2Adapter",
            "adapter_params": {"socket": socket, "model_id": model_id, "timeout_ms": 5000},
        }
    )
    memory = L1MemoryManagerConfig(size_in_bytes=64 << 20, use_lazy=False, shm_name="")
    return StorageManager(
        StorageManagerConfig(
            L1ManagerConfig(memory), EvictionConfig("LRU"), l2_adapter_config=L2AdaptersConfig([plugin])
        )
    )


def keys_of(salt: str = "") -> list[ObjectKey]:
    return [ObjectKey(bytes([i]) * 32, "org/model", 0, cache_salt=salt) for i in range(NUM_CHUNKS)]


def truth(index: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(index)).to(DTYPE)


def store(manager: StorageManager) -> None:
    keys = keys_of()
    reserved = manager.reserve_write(keys, MemoryLayoutDesc([SHAPE], [DTYPE]))
    assert len(reserved) == NUM_CHUNKS
    for i, key in enumerate(keys):
        reserved[key].tensor.copy_(truth(i))
    manager.finish_write(keys)
    adapter = manager.l2_adapters()[0][1]
    deadline_s = time.monotonic() + 20
    while adapter.get_usage().total_bytes_used < NUM_CHUNKS * truth(0).nbytes:
        assert time.monotonic() < deadline_s, adapter.get_usage()
        time.sleep(0.01)


def fetch(manager: StorageManager, keys: list[ObjectKey], dtype: torch.dtype = DTYPE) -> int:
    """The number of chunks that came from L2; each is compared with the stored one."""
    group = GroupedObjectKeys(keys, 0, MemoryLayoutDesc([SHAPE], [dtype]))
    handle = manager.submit_prefetch_task(PrefetchTaskSpec([group]))
    assert manager.wait_prefetch_status(handle, 20)
    result = manager.query_prefetch_status(handle)
    hits = [key for i, key in enumerate(keys) if result.l2_hit_cells[0].test(i)]
    if hits:
        with manager.read_prefetched_results(hits) as objects:
            for key, one in zip(hits, objects, strict=True):
                assert torch.equal(one.tensor, truth(key.chunk_hash[0])), "wrong bytes"
        manager.finish_read_prefetched(hits)
    return len(hits)


if __name__ == "__main__":
    socket, model_id, task = sys.argv[1:]
    manager = manager_on(socket, model_id)
    try:
        if task == "store":
            store(manager)
        elif task == "fetch":
            print("FOUND", fetch(manager, keys_of("other"), DTYPE), fetch(manager, keys_of(), torch.float16),
                  fetch(manager, keys_of()))  # fmt: skip
    finally:
        manager.close()
