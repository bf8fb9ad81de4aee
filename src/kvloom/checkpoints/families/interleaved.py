"""Heads of q and k in halves: a spec rotates dimensions i and i + dim/2 of a head together, some files and adapters
hold such partners side by side, as dimensions 2i and 2i + 1.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvloom.checkpoints.families.mixers import LatentAttention
from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.quantized.numbers import Floats, Numbers
from kvloom.checkpoints.source import RawTensor, Tensor, WeightSource

Order = npt.NDArray[np.int64]


def row_order(spec: DecoderSpec, name: str) -> Order | None:
    """For each row of tensor `name` in halves its row where partners are side by side; None = rows are as they are."""
    layer, _, part = name.removeprefix("layers.").partition(".")
    mixers = dict(spec.attention)
    if part.removesuffix("_bias") not in ("q", "k", "q_up", "kv_down") or int(layer) not in mixers:
        return None
    mixer = mixers[int(layer)]
    if isinstance(mixer, LatentAttention):
        return _latent_order(mixer, part)
    heads = mixer.num_heads if part.startswith("q") else mixer.num_kv_heads
    rotated = max((rope.dim for rope in spec.ropes), default=mixer.head_dim)
    of_head = np.arange(mixer.head_dim)
    of_head[:rotated] = of_head[:rotated].reshape(-1, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * mixer.head_dim + of_head).reshape(-1)


def _latent_order(mixer: LatentAttention, part: str) -> Order:
    """The same of queries, or of what keys are made of: the last channels of a head are rotated."""
    heads, kept = (mixer.num_heads, mixer.nope_dim) if part != "kv_down" else (1, mixer.kv_rank)
    of_head = np.arange(kept + mixer.rope_dim)
    of_head[kept:] = of_head[kept:].reshape(-1, 2).T.reshape(-1)
    return (np.arange(heads)[:, None] * len(of_head) + of_head).reshape(-1)


class HalvedHeads:
    """A WeightSource over one whose queries and keys have partners side by side; values and forms are its own."""

    def __init__(self, source: WeightSource, spec: DecoderSpec) -> None:
        assert not spec.qk_norm, "weights of such norms would be in the other order, too"
        self._source, self._spec = source, spec

    def names(self) -> list[str]:
        return self._source.names()

    def form(self, name: str) -> str:
        return self._source.form(name)

    def tensor(self, name: str) -> Tensor:
        """Raises ModelError when the spec has no such tensor."""
        whole, order = self._source.tensor(name), row_order(self._spec, name)
        if order is None:
            return whole
        if not isinstance(whole, RawTensor) or len(whole.shape) == 1:
            return Reordered(whole, order, whole.name)
        data = whole.data[order]
        data.flags.writeable = False
        return replace(whole, data=data)


@dataclass(frozen=True, slots=True)
class Reordered:
    """Rows of a tensor, or numbers of a vector, in another order, or some of them; it is read whole."""

    whole: Tensor
    order: Order
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.order), *self.whole.shape[1:])

    @property
    def form(self) -> str:
        return self.whole.form

    def number_pieces(self) -> Iterator[tuple[int, Numbers]]:
        parts = [numbers for _, numbers in self.whole.number_pieces()]
        yield 0, Numbers.joined(parts).of_rows(self.order)

    def float32(self) -> Floats:
        return self.whole.float32()[self.order]

    def float32_pieces(self) -> Iterator[tuple[int, Floats]]:
        yield 0, self.float32()
