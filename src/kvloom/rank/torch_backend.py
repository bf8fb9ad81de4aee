"""The parts of a rank that need torch: devices, and the reference backend on them. Imported by loading.py on demand."""

import contextlib
import importlib
import os
from dataclasses import astuple

import torch

from kvloom.checkpoints import footprint
from kvloom.contract.capacity import Pools
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ModelError
from kvloom.rank.kernels.reference import ReferenceBackend, ReferenceOptions
from kvloom.rank.parallel.mesh import Mesh, join

__all__ = ["ReferenceBackend", "check_device", "device_bytes", "join_mesh", "least_pools", "options_of"]

_KV = {"bf16": torch.bfloat16, "int8": torch.int8, "float32": torch.float32}


def check_device(device: str) -> None:
    """Raises ModelError when this torch has no such device: "cpu", "cuda", "npu", or one of several ("cuda:1")."""
    kind = device.partition(":")[0]
    if kind == "npu":
        with contextlib.suppress(ImportError):
            importlib.import_module("torch_npu")  # adds torch.npu
    if kind != "cpu" and not (hasattr(torch, kind) and getattr(torch, kind).is_available()):
        raise ModelError(
            f"device: torch {torch.__version__} sees no {kind} here; install its build for {kind}, or take cpu"
        )


def device_bytes(device: str) -> int:
    """Free memory of a device that has memory of its own."""
    return int(getattr(torch, device.partition(":")[0]).mem_get_info(device)[0])


def join_mesh(config: EngineConfig, rank: int, rendezvous: str) -> Mesh:
    """Join the mesh of the ranks of `config`."""
    if config.world_size > 1 or config.rank_cores:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (1 if config.rank_cores else config.world_size)))
    return join(rank, config.world_size, rendezvous, config.device, config.step_timeout_s)


def least_pools(pools: Pools, mesh: Mesh, config: EngineConfig) -> Pools:
    """The smallest sizes of all ranks, which every rank can hold."""
    return Pools(*(mesh.least(number, config.device) for number in astuple(pools)))


def options_of(config: EngineConfig, block_size: int, mesh: Mesh, pools: Pools) -> ReferenceOptions:
    """How this rank computes. `block_size`: tokens."""
    dtype = torch.bfloat16 if config.dtype == "bfloat16" else torch.float32
    kv_dtype = _KV[footprint.kv_dtype(config, "reference")]
    sizes = block_size, mesh, pools.num_places, pools.num_window_blocks
    return ReferenceOptions(_device_of(config, mesh), dtype, kv_dtype, *sizes)


def _device_of(config: EngineConfig, mesh: Mesh) -> str:
    """Each rank has its own device, unless the device is named or there is only one, as with the CPU."""
    numbers = config.device_ids or (range(mesh.world_size) if mesh.world_size > 1 else ())
    return f"{config.device}:{numbers[mesh.rank]}" if numbers and config.device in ("cuda", "npu") else config.device
