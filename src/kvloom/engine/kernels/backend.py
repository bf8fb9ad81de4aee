"""The one contract between the runner and whatever computes: a backend runs a ragged step over a paged KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvloom.engine.lora import AdapterFile
from kvloom.engine.models.spec import DecoderSpec


class Ragged(NamedTuple):
    """T tokens of S sequences, computed together; tensors int32.

    ids, pos [T]: token ids and positions; qstart [S+1]: tokens qstart[s] .. qstart[s+1] belong to s, at consecutive
    positions; block_table [S, max_blocks], -1 = unused: position p of s lives in slot p % block_size of block
    block_table[s, p // block_size]; adapters [S]: what add_adapter was given, 0 = none; () = none for all.
    """

    ids: Tensor
    pos: Tensor
    qstart: Tensor
    block_table: Tensor
    adapters: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """What a step found of the rows asked for; valid until the next step.

    tops [R]: 0 = all logits of the row, in `full` [rows with 0, vocab] float32, in order; k = the k largest, largest
    first, of equal ones the smaller token first: values [R, >= k] float32 and ids [R, >= k] int32. states [N, hidden]
    float32: of the tokens whose states were asked for, behind the last norm.
    """

    tops: list[int]
    full: Tensor
    values: Tensor
    ids: Tensor
    states: Tensor


def most_likely(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of logits [n] and where they are, in the order of Head. count <= n."""
    lowest = logits.topk(count).values[-1]
    above = (logits > lowest).nonzero()[:, 0]
    equal = (logits == lowest).nonzero()[: count - len(above), 0]
    places = torch.cat((above, equal)).sort().values
    values, order = logits[places].sort(descending=True, stable=True)
    return values, places[order]


class Draw(Protocol):
    """A random token of one row of logits, as sampler.draw_plain: point in [0, 1) picks from the distribution that
    temperature > 0, then top_p < 1, then min_p > 0 leave."""

    def __call__(self, logits: Tensor, temperature: float, top_p: float, min_p: float, point: float) -> int: ...


class Backend(Protocol):
    """Owns the packed weights and the KV cache of one model on one device."""

    name: str
    block_size: int  # tokens a KV block
    num_blocks: int
    kv_bytes: int
    weight_bytes: int
    kv_layout: str  # how bytes lie in a block of the KV cache, beyond dtype and shape, and how they are computed

    @property
    def draw(self) -> Draw | None:
        """Its own way to draw a token, where it has a faster one than the sampler's."""

    @property
    def kv_parts(self) -> tuple[Tensor, ...]:
        """The tensors of the KV cache, each [layers, 2, num_blocks, ...], contiguous."""
        ...

    @property
    def whole_spec(self) -> DecoderSpec:
        """The model's, also where this backend holds a part of it."""

    def add_adapter(self, id: int, adapter: AdapterFile) -> int:
        """Hold an adapter that was read for whole_spec, as `id` > 0. Its bytes. Raises BadRequest."""
        ...

    def drop_adapter(self, id: int) -> None:
        """Unknown ids are ignored."""

    def step(self, batch: Ragged, rows: Tensor) -> Tensor:
        """Computes the batch and writes its keys and values; returns the logits of its tokens `rows` [R] int32.

        [R, vocab] float32, valid until the next step. The result for a sequence does not depend on the others.
        """
        ...

    def step_head(self, batch: Ragged, rows: Tensor, tops: list[int], states: Tensor | None = None) -> Head:
        """The same step, with only the tops[r] <= vocab largest logits of row r where that is not 0.

        states [N] int32: which tokens' states are wanted, None = of none.
        """
        ...
