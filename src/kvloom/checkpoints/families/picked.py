"""Tensors whose rows files hold among those of another one, head by head.

q_gated   of each head its queries, then its gates
qkvz      of each key head its queries and keys, then the values and gates of its value heads
ba        of each key head the betas of its value heads, then their decays
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvloom.checkpoints.families.interleaved import Reordered
from kvloom.checkpoints.families.mixers import Attention, DeltaRule, Mixer
from kvloom.checkpoints.source import RawTensor, Tensor

Order = npt.NDArray[np.int64]
PICKED = {"q_gated": ("q", "q_gate"), "qkvz": ("conv_in", "gate_in"), "ba": ("beta_in", "decay_in")}


def rows_of(part: str, mixer: Mixer | None) -> Order:
    """For each row of the tensor `part` its row in the one of PICKED that has it."""
    if isinstance(mixer, Attention):
        both = np.arange(2 * mixer.q_size).reshape(mixer.num_heads, 2, mixer.head_dim)
        return both[:, int(part == "q_gate")].reshape(-1)
    assert isinstance(mixer, DeltaRule), "the layer has a delta rule"
    parts = {
        "beta_in": (0,),
        "decay_in": (1,),
        "conv_in": (0, 1, 2),
        "gate_in": (3,),
    }[part]
    each = _sizes(mixer)["ba" if part in PICKED["ba"] else "qkvz"]
    all_rows = np.arange(mixer.num_k_heads * sum(each)).reshape(mixer.num_k_heads, -1)
    cut = np.split(all_rows, np.cumsum(each)[:-1], axis=1)
    return np.concatenate([cut[index].reshape(-1) for index in parts])


def _sizes(mixer: DeltaRule) -> dict[str, list[int]]:
    """Rows of each section of a key head."""
    times = mixer.num_v_heads // mixer.num_k_heads
    values = times * mixer.v_dim
    return {"qkvz": [mixer.k_dim, mixer.k_dim, values, values], "ba": [times, times]}


def pick(name: str, whole: Tensor, rows: Order) -> Tensor:
    """The rows of `whole` as a tensor of their own."""
    if not isinstance(whole, RawTensor):
        return Reordered(whole, rows, name)
    data = whole.data[rows]
    data.flags.writeable = False
    return replace(whole, name=name, shape=(len(rows), *whole.shape[1:]), data=data)
