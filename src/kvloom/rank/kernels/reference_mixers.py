"""Mixers with a state in plain torch, token by token, in float32. The meaning of each is in families/mixers.py."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from kvloom.checkpoints.families.mixers import DeltaRule, Mamba2, Recurrent, ShortConv

_NORM_EPS = 1e-6  # below the root of the squares of q and k


@dataclass(frozen=True, slots=True)
class MixerInput:
    """T tokens of one sequence at a layer. linear(name) [T, out]: their normed input times a matrix of the mixer;
    weight(name): one of its other tensors; memory [state_floats]: what is kept of the sequence, brought up to date.
    """

    linear: Callable[[str], Tensor]
    weight: Callable[[str], Tensor]
    memory: Tensor
    norm_eps: float


def mix(mixer: Recurrent, given: MixerInput) -> Tensor:
    """The input of the mixer's `out`, float32 [T, in]."""
    match mixer:
        case DeltaRule():
            return _delta_rule(mixer, given)
        case Mamba2():
            return _mamba2(mixer, given)
        case ShortConv():
            return _short_conv(mixer, given)


def _short_conv(mixer: ShortConv, given: MixerInput) -> Tensor:
    b, c, x = given.linear("short_in").float().view(-1, 3, mixer.size).unbind(1)
    return c * _convolved(b * x, given.weight("conv").float(), given.memory)


def _delta_rule(mixer: DeltaRule, given: MixerInput) -> Tensor:
    num_heads, k_size = mixer.num_v_heads, mixer.k_size
    kept = (mixer.conv_width - 1) * mixer.conv_size
    x = _convolved(given.linear("conv_in").float(), given.weight("conv").float(), given.memory[:kept])
    x = F.silu(x)
    q, k, v = x[:, :k_size], x[:, k_size : 2 * k_size], x[:, 2 * k_size :]
    q, k = (_spread(mixer, _unit(part.view(len(x), -1, mixer.k_dim))) for part in (q, k))
    q, v = q * mixer.k_dim**-0.5, v.view(len(x), -1, mixer.v_dim)
    beta = given.linear("beta_in").float().sigmoid()
    step = F.softplus(given.linear("decay_in").float() + given.weight("decay_bias").float())
    decay = (given.weight("decay").float() * step).exp()
    state = given.memory[kept:].view(num_heads, mixer.k_dim, mixer.v_dim)
    out = torch.empty_like(v)
    for t in range(len(v)):
        state *= decay[t, :, None, None]
        delta = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state += k[t, :, :, None] * delta[:, None, :]
        out[t] = torch.einsum("hkv,hk->hv", state, q[t])
    out *= torch.rsqrt(out.square().mean(-1, keepdim=True) + given.norm_eps) * given.weight("out_norm").float()
    return out.flatten(1) * F.silu(given.linear("gate_in").float())


def _mamba2(mixer: Mamba2, given: MixerInput) -> Tensor:
    shared, kept = mixer.num_groups * mixer.state_dim, (mixer.conv_width - 1) * mixer.conv_size
    x = _convolved(given.linear("conv_in").float(), given.weight("conv").float(), given.memory[:kept])
    x = F.silu(x + given.weight("conv_bias").float()) if mixer.has_conv_bias else F.silu(x)
    x, b, c = x[:, : mixer.size], x[:, mixer.size : -shared], x[:, -shared:]
    x = x.view(len(x), mixer.num_heads, mixer.head_dim)
    times = mixer.num_heads // mixer.num_groups
    b, c = (part.view(len(x), -1, mixer.state_dim).repeat_interleave(times, 1) for part in (b, c))
    step = F.softplus(given.linear("decay_in").float() + given.weight("decay_bias").float())
    step = step.clamp(mixer.least_step, mixer.most_step)
    decay = (given.weight("decay").float() * step).exp()
    state = given.memory[kept:].view(mixer.num_heads, mixer.head_dim, mixer.state_dim)
    out = given.weight("skip").float()[:, None] * x
    for t in range(len(x)):
        state *= decay[t, :, None, None]
        state += (step[t, :, None] * x[t])[:, :, None] * b[t, :, None, :]
        out[t] += torch.einsum("hpn,hn->hp", state, c[t])
    out = out.flatten(1) * F.silu(given.linear("gate_in").float())
    if not mixer.has_norm:
        return out
    groups = out.view(len(out), mixer.num_groups, -1)
    groups = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + given.norm_eps)
    return groups.flatten(1) * given.weight("out_norm").float()


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
