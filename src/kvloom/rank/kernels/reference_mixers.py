"""Mixers with a state in plain torch, token by token, in float32. The meaning of each is in families/mixers.py."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvloom.checkpoints.families.mixers import DeltaRule, KimiDelta, Mamba2, Recurrent, ShortConv

_NORM_EPS = 1e-6  # below the root of the squares of q and k


@dataclass(frozen=True, slots=True)
class MixerInput:
    """T tokens of one sequence at a layer. product(name, x) [T, out]: x [T, in], None = their normed input, times a
    matrix of the mixer; weight(name): one of its other tensors; memory [state_floats]: what is kept of the sequence,
    brought up to date.
    """

    product: Callable[[str, Tensor | None], Tensor]
    weight: Callable[[str], Tensor]
    memory: Tensor
    norm_eps: float

    def linear(self, name: str, below: str = "") -> Tensor:
        """The normed input times a matrix, in float32; `below`: times that one first."""
        return self.product(name, self.product(below, None) if below else None).float()

    def values(self, name: str) -> Tensor:
        """As weight, in float32."""
        return self.weight(name).float()


def mix(mixer: Recurrent, given: MixerInput) -> Tensor:
    """The input of the matrix out_name(mixer), float32 [T, in]."""
    match mixer:
        case DeltaRule():
            return _delta_rule(mixer, given)
        case KimiDelta():
            return _kimi_delta(mixer, given)
        case Mamba2():
            return _mamba2(mixer, given)
        case ShortConv():
            return _short_conv(mixer, given)


def _short_conv(mixer: ShortConv, given: MixerInput) -> Tensor:
    b, c, x = given.linear("short_in").view(-1, 3, mixer.size).unbind(1)
    return c * _convolved(b * x, given.values("conv"), given.memory)


def _delta_rule(mixer: DeltaRule, given: MixerInput) -> Tensor:
    num_heads, k_size = mixer.num_v_heads, mixer.k_size
    kept = (mixer.conv_width - 1) * mixer.conv_size
    x = _convolved(given.linear("conv_in"), given.values("conv"), given.memory[:kept])
    x = F.silu(x)
    q, k, v = x[:, :k_size], x[:, k_size : 2 * k_size], x[:, 2 * k_size :]
    q, k = (_spread(mixer, _unit(part.view(len(x), -1, mixer.k_dim))) for part in (q, k))
    q, v = q * mixer.k_dim**-0.5, v.view(len(x), -1, mixer.v_dim)
    beta = given.linear("beta_in").sigmoid()
    step = F.softplus(given.linear("decay_in") + given.values("decay_bias"))
    decay = (given.values("decay") * step).exp()
    state = given.memory[kept:].view(num_heads, mixer.k_dim, mixer.v_dim)
    out = _advanced(state, (q, k, v), beta, decay[..., None])
    return _normed(out, given).flatten(1) * F.silu(given.linear("gate_in"))


def _kimi_delta(mixer: KimiDelta, given: MixerInput) -> Tensor:
    kept = (mixer.conv_width - 1) * 3 * mixer.size
    x = torch.cat([given.linear(part) for part in "qkv"], 1)
    conv = torch.cat([given.values(f"{part}_conv") for part in "qkv"])
    heads = F.silu(_convolved(x, conv, given.memory[:kept])).view(len(x), 3, mixer.num_heads, -1)
    q, k, v = heads.unbind(1)
    step = given.linear("decay_up", below="decay_down") + given.values("decay_bias")
    decay = (given.values("decay")[:, None] * F.softplus(step).view_as(k)).exp()
    state = given.memory[kept:].view(mixer.num_heads, mixer.head_dim, mixer.head_dim)
    out = _advanced(state, (_unit(q) * mixer.head_dim**-0.5, _unit(k), v), given.linear("beta_in").sigmoid(), decay)
    return _normed(out, given).flatten(1) * given.linear("out_gate_up", below="out_gate_down").sigmoid()


def _advanced(state: Tensor, qkv: tuple[Tensor, Tensor, Tensor], beta: Tensor, decay: Tensor) -> Tensor:
    """Output [T, heads, v_dim] of the delta rule for queries, keys and values [T, heads, dim], beta [T, heads], and
    what stays of each key channel, or of all, [T, heads, k_dim or 1]. Brings state [heads, k_dim, v_dim] up to date.
    """
    q, k, v = qkv
    out = torch.empty_like(v)
    for t in range(len(v)):
        state *= decay[t, :, :, None]
        delta = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state += k[t, :, :, None] * delta[:, None, :]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    return out


def _normed(out: Tensor, given: MixerInput) -> Tensor:
    """RMSNorm of each head."""
    return out * (torch.rsqrt(out.square().mean(-1, keepdim=True) + given.norm_eps) * given.values("out_norm"))


def _mamba2(mixer: Mamba2, given: MixerInput) -> Tensor:
    shared, kept = mixer.num_groups * mixer.state_dim, (mixer.conv_width - 1) * mixer.conv_size
    x = _convolved(given.linear("conv_in"), given.values("conv"), given.memory[:kept])
    x = F.silu(x + given.values("conv_bias")) if mixer.has_conv_bias else F.silu(x)
    x, b, c = x[:, : mixer.size], x[:, mixer.size : -shared], x[:, -shared:]
    x = x.view(len(x), mixer.num_heads, mixer.head_dim)
    times = mixer.num_heads // mixer.num_groups
    b, c = (part.view(len(x), -1, mixer.state_dim).repeat_interleave(times, 1) for part in (b, c))
    step = F.softplus(given.linear("decay_in") + given.values("decay_bias"))
    step = step.clamp(mixer.least_step, mixer.most_step)
    decay = (given.values("decay") * step).exp()
    state = given.memory[kept:].view(mixer.num_heads, mixer.head_dim, mixer.state_dim)
    out = given.values("skip")[:, None] * x
    for t in range(len(x)):
        state *= decay[t, :, None, None]
        state += (step[t, :, None] * x[t])[:, :, None] * b[t, :, None, :]
        out[t] += torch.einsum("hpn,hn->hp", state, c[t])
    out = out.flatten(1) * F.silu(given.linear("gate_in"))
    if not mixer.has_norm:
        return out
    groups = out.view(len(out), mixer.num_groups, -1)
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + given.norm_eps)
    return groups.flatten(1) * given.values("out_norm")


def _convolved(x: Tensor, weight: Tensor, before: Tensor) -> Tensor:
    """Causal convolution of each channel: x [T, channels], weight [channels, width]. before [(width - 1) * channels]:
    the inputs before x, oldest first; becomes the last ones of x.
    """
    width = weight.shape[1]
    whole = torch.cat((before.view(width - 1, -1), x))
    before.copy_(whole[len(x) :].flatten())
    return sum((whole[j : j + len(x)] * weight[:, j] for j in range(width)), torch.zeros_like(x))


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _NORM_EPS)


def _spread(mixer: DeltaRule, x: Tensor) -> Tensor:
    """[T, k heads, k_dim] -> [T, v heads, k_dim]: of each value head its key head."""
    times = mixer.num_v_heads // mixer.num_k_heads
    return x.repeat(1, times, 1) if mixer.is_tiled else x.repeat_interleave(times, 1)
