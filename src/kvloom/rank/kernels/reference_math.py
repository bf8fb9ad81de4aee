"""Functions of the reference backend."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from kvloom.checkpoints.families.mixers import Rope
from kvloom.checkpoints.families.spec import DecoderSpec, Experts


def normed(x: Tensor, eps: float) -> Tensor:
    """RMSNorm over the last dimension without weights, in float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def routed(logits: Tensor, experts: Experts, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Numbers and weights of the experts that each row of router logits [T, experts] chooses, [T, per_token]."""
    scores = logits.sigmoid() if experts.scores == "sigmoid" else logits.softmax(-1)
    has_groups = experts.kept_groups < experts.groups
    ranks = logits if experts.scores == "softmax" and correction is None and not has_groups else scores
    if correction is not None:
        ranks = ranks + correction.float()
    if has_groups:
        groups = ranks.view(len(ranks), experts.groups, -1)
        kept = groups.topk(experts.group_best, -1).values.sum(-1).topk(experts.kept_groups, -1).indices
        dropped = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter(-1, kept, False)
        ranks = groups.masked_fill(dropped[..., None], -torch.inf).flatten(-2)
    chosen = ranks.topk(experts.per_token, -1).indices
    weights = scores.gather(-1, chosen)
    if experts.weighs_chosen:
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-20)
    return chosen, weights * experts.scale


def mask_of(keys: Tensor, pos: Tensor, window: int | None, sees_ahead: bool) -> Tensor:
    """[T, K]: which keys, by position, a token at `pos` attends to."""
    behind = pos[:, None] - keys[None, :]
    mask = torch.ones_like(behind, dtype=torch.bool) if sees_ahead else behind >= 0
    return mask if window is None else mask & (behind.abs() < window)


def capped(x: Tensor, softcap: float) -> Tensor:
    return torch.tanh(x / softcap) * softcap if softcap else x


def gated(spec: DecoderSpec, gate: Tensor, up: Tensor) -> Tensor:
    """`up` times the activation of `gate`, both [T, channels]."""
    if spec.activation == "clamped":
        gate, up = gate.clamp(max=spec.glu_limit), up.clamp(-spec.glu_limit, spec.glu_limit)
        return gate * torch.sigmoid(spec.glu_alpha * gate) * (up + 1)
    return (F.silu(gate) if spec.activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def grown(spec: DecoderSpec, q: Tensor, pos: Tensor) -> Tensor:
    """Queries [T, heads, dim], larger at later positions [T] where the model has that."""
    if not spec.query_growth:
        return q
    growth = 1 + spec.query_growth * torch.log1p(pos // spec.growth_unit)
    return q * growth[:, None, None].to(q.dtype)


def turns_of(rope: Rope, pos: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, 1, dim] of the rotary angles at `pos`."""
    inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32, device=pos.device)
    angles = torch.outer(pos.float(), inv_freq).repeat(1, 2)[:, None, :]
    cos, sin = ((f(angles) * rope.attention_factor).to(dtype) for f in (torch.cos, torch.sin))
    return cos, sin


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of the first dimensions of x [T, heads, head_dim]; as many as cos has."""
    rotated, kept = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, -1)
    rotated = rotated * cos + torch.cat((-second, first), -1) * sin
    return torch.cat((rotated, kept), -1) if kept.shape[-1] else rotated


def attended(
    query: Tensor, cached: Sequence[Tensor], mask: Tensor, sinks: Tensor | None, rules: tuple[float, float]
) -> Tensor:
    """Attention [T, heads, dim] of queries [T, heads, head_dim] to keys and values [K, kv_heads, dim]; mask [T, K],
    sinks [heads]. `rules`: scale of scores, 0 = 1 / sqrt(head_dim); their softcap, 0 = none.
    """
    query, key, value = (part.transpose(0, 1)[None] for part in (query, *cached))
    scale, softcap = rules[0] or query.shape[-1] ** -0.5, rules[1]
    if not softcap and sinks is None:
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
        return out[0].transpose(0, 1)
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    scores = capped(query @ key.transpose(2, 3) * scale, softcap).masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    out = scores.softmax(-1, torch.float32)[..., : key.shape[2]].to(value.dtype) @ value
    return out[0].transpose(0, 1)
