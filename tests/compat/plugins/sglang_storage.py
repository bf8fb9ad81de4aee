"""Run by an interpreter with SGLang: its storage class over EMS, made by its factory. Argument: the agent's socket."""

import sys
from collections.abc import Callable
from types import SimpleNamespace

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

PAGE, LAYERS, HEADS, DIM, PAGES = 16, 3, 2, 8, 12


class HostPool:
    """The parts of SGLang's MHATokenToKVPoolHost that its storage classes use, in its layout "page_first"."""

    layout, page_size, layer_num, head_num, head_dim, dtype = "page_first", PAGE, LAYERS, HEADS, DIM, torch.bfloat16

    def __init__(self, seed: int, **changes: object) -> None:
        vars(self).update(changes)
        shape = (2, PAGES * PAGE, LAYERS, HEADS, DIM)
        self.kv_buffer = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)

    def get_size_per_token(self) -> int:
        return 2 * LAYERS * HEADS * DIM * 2

    def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
        size = PAGE * self.get_size_per_token() // 2
        starts = [self.kv_buffer[half, index].data_ptr() for index in indices[::PAGE].tolist() for half in (0, 1)]
        return starts, [size] * len(starts)

    def get_dummy_flat_data_page(self) -> torch.Tensor:
        return torch.zeros(2 * PAGE * LAYERS * HEADS * DIM, dtype=torch.bfloat16)

    def page(self, number: int) -> torch.Tensor:
        return self.kv_buffer[:, number * PAGE : (number + 1) * PAGE]


def backend(socket: str, pool: HostPool, style: int, **changes: object) -> HiCacheStorage:
    settings = {"socket": socket, "timeout_ms": 5000, **changes.pop("settings", {})}
    names = {"backend_name": "ems", "module_path": "ems.integration.sglang", "class_name": "EmsHiCache"}
    fields = dict.fromkeys(("tp_rank", "pp_rank", "attn_cp_rank"), 0) | {"tp_size": 1, "pp_size": 1, "attn_cp_size": 1}
    config = HiCacheStorageConfig(
        **{
            **fields,
            "is_mla_model": False,
            "enable_storage_metrics": False,
            "is_page_first_layout": True,
            "model_name": "org/model",
            "extra_config": {**names, "interface_v1": style, "ems": settings},
            **changes,
        }
    )
    made = StorageBackendFactory.create_backend("dynamic", config, pool)
    made.register_mem_pool_host(pool)
    return made


def indices(*pages: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def zero_copy(socket: str) -> None:
    one, other = HostPool(1), HostPool(2)
    first = backend(socket, one, 1)
    keys = [f"hash{i}" for i in range(5)]
    assert first.batch_set_v1(keys, indices(0, 1, 2, 3, 4)) == [True] * 5
    assert first.batch_set_v1(keys, indices(0, 1, 2, 3, 4)) == [True] * 5, "again"
    second, before = backend(socket, other, 1), other.page(0).clone()
    assert second.batch_exists([*keys, "nobody's"]) == 5
    assert not second.exists("nobody's")
    assert second.batch_get_v1([*keys, "nobody's"], indices(11, 10, 9, 8, 7, 0)) == [True] * 5 + [False]
    assert all(torch.equal(other.page(11 - i), one.page(i)) for i in range(5))
    assert torch.equal(other.page(0), before), "a miss leaves the page as it was"
    for stranger in (
        backend(socket, HostPool(3, layout="page_first_direct"), 1),
        backend(socket, HostPool(3, dtype=torch.float16), 1),
        backend(socket, HostPool(3), 1, model_name="org/other"),
        backend(socket, HostPool(3), 1, tp_size=2),
        backend(socket, HostPool(3), 1, settings={"model_id": "named"}),
        backend(socket, HostPool(3), 0),
    ):
        assert stranger.batch_exists(keys) == 0
        stranger.close()
    second.clear()
    assert (second.batch_exists(keys), first.batch_exists(keys)) == (0, 5), "cleared for one engine only"
    assert "32 indices and 4 pieces for 5 pages" in refusal(lambda: second.batch_get_v1(keys, indices(0, 1)))
    first.close()
    second.close()


def ranks_of_mla(socket: str) -> None:
    pools = [HostPool(4), HostPool(5)]
    ranks = [backend(socket, pool, 1, is_mla_model=True, tp_size=2, tp_rank=i) for i, pool in enumerate(pools)]
    assert ranks[0].batch_set_v1(["m"], indices(0)) == [True]
    assert ranks[1].batch_get_v1(["m"], indices(3)) == [True]
    assert torch.equal(pools[1].page(3), pools[0].page(0))


def as_tensors(socket: str) -> None:
    one, other = backend(socket, HostPool(1), 0), backend(socket, HostPool(2), 0)
    pages = [one.mem_pool_host.page(i).flatten() for i in range(3)]
    assert one.batch_set(["a", "b"], pages[:2])
    assert one.set("c", pages[2])
    targets = [other.mem_pool_host.get_dummy_flat_data_page() for _ in range(4)]
    found = other.batch_get(["a", "b", "c", "d"], targets)
    assert [each is not None for each in found] == [True, True, True, False]
    assert all(torch.equal(each, page) for each, page in zip(found, pages, strict=False))
    assert other.get("d") is None
    assert torch.equal(other.get("a"), pages[0])
    assert other.batch_exists(["a", "b", "c", "d"]) == 3


def refusal(call: Callable[[], object]) -> str:
    """The message of the ValueError that the call must raise."""
    try:
        call()
    except ValueError as error:
        return str(error)
    raise AssertionError("it was not refused")


def refusals(socket: str) -> None:
    told = refusal(lambda: backend(socket, HostPool(1), 1, settings={"sokcet": "x"}))
    assert told.startswith("hicache_storage_backend_extra_config.ems.sokcet: is not known"), told
    told = refusal(lambda: backend(socket, HostPool(1), 1, should_split_heads=True))
    assert told.startswith("tp_lcm_size: "), told
    hybrid = backend(socket, HostPool(1), 1)
    told = refusal(lambda: hybrid.register_mem_host_pool_v2(SimpleNamespace(), "mamba"))
    assert told.startswith("mamba: "), told


def without_an_agent() -> None:
    alone = backend("/nowhere/ems.sock", HostPool(1), 1, settings={"socket": "/nowhere/ems.sock", "timeout_ms": 50})
    assert alone.batch_set_v1(["k"], indices(0)) == [False]
    assert alone.batch_get_v1(["k"], indices(0)) == [False]
    assert alone.batch_exists(["k"]) == 0
    alone.close()


if __name__ == "__main__":
    zero_copy(sys.argv[1])
    ranks_of_mla(sys.argv[1])
    as_tensors(sys.argv[1])
    refusals(sys.argv[1])
    without_an_agent()
    print("WELL")
