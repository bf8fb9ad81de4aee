"""Latent attention of the reference backend, in its absorbed form: what stands before and behind the softmax."""

import torch
from torch import Tensor

from kvloom.checkpoints.families.mixers import LatentAttention
from kvloom.rank.kernels.reference_math import rotate

Turn = tuple[Tensor, Tensor] | None  # cos and sin [T, 1, rope_dim]; None = positions count nothing


def latent_queries(own: LatentAttention, q: Tensor, k_up: Tensor, turn: Turn) -> Tensor:
    """Queries [T, heads, head_dim] of the output of `q` [T, q_size]."""
    heads = q.view(len(q), own.num_heads, -1)
    plain, rotated = heads[..., : own.nope_dim], heads[..., own.nope_dim :]
    up = k_up.view(own.num_heads, own.kv_rank, own.nope_dim)
    return torch.cat((torch.einsum("thn,hkn->thk", plain, up), _turned(rotated, turn)), -1)


def latent_key(latent: Tensor, rest: Tensor, turn: Turn) -> Tensor:
    """The key [T, 1, head_dim] of the normed latent [T, kv_rank] and the other channels [T, rope_dim]."""
    return torch.cat((latent[:, None], _turned(rest[:, None], turn)), -1)


def latent_output(own: LatentAttention, sums: Tensor, v_up: Tensor) -> Tensor:
    """What `o` reads, [T, out_size], of weighted sums of latents [T, heads, kv_rank]."""
    return torch.einsum("thk,hvk->thv", sums, v_up.view(own.num_heads, own.out_dim, own.kv_rank)).flatten(1)


def _turned(x: Tensor, turn: Turn) -> Tensor:
    return x if turn is None else rotate(x, *turn)
