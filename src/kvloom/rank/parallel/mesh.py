"""Mesh: the ranks of one model and their collective operations, over torch.distributed."""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}  # by device type


@dataclass(frozen=True, slots=True)
class Mesh:
    """Rank `rank` of `world_size`. Alone, every operation is the identity."""

    rank: int = 0
    world_size: int = 1

    def sum(self, part: Tensor) -> Tensor:
        """Sum of every rank's `part`, in place; the same bits on all ranks. Blocks until all have come."""
        if self.world_size > 1:
            dist.all_reduce(part)
        return part

    def least(self, value: int, device: str) -> int:
        """The smallest `value` of all ranks."""
        if self.world_size == 1:
            return value
        held = torch.tensor(value, dtype=torch.int64, device=device)
        dist.all_reduce(held, op=dist.ReduceOp.MIN)
        return int(held)


def join(rank: int, world_size: int, rendezvous: str, device: str, timeout_s: float) -> Mesh:
    """Meet the other ranks at the file `rendezvous`. When a rank dies the others' operations raise."""
    if world_size > 1:
        kind = torch.device(device).type
        if kind == "cpu":  # all ranks are on this machine
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            BACKENDS[kind],
            init_method=f"file://{rendezvous}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    return Mesh(rank, world_size)
