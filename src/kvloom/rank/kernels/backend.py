"""The one contract between the runner and whatever computes: a backend runs a ragged step over a paged KV cache.

What goes in and what comes out are arrays in host memory, wherever a backend computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from kvloom.checkpoints.families.spec import DecoderSpec
from kvloom.checkpoints.lora import AdapterFile

Floats = np.ndarray[Any, np.dtype[np.float32]]
Ints = np.ndarray[Any, np.dtype[np.int32]]
Ids = np.ndarray[Any, np.dtype[np.integer[Any]]]
Choices = np.ndarray[Any, np.dtype[np.void]]

# How a backend chooses the token behind a row: as sampler.draw_plain, at the point sampler.uniforms(seed, position), of
# all logits or of the candidates asked for. temperature 0: only where one candidate is asked for.
CHOICE = np.dtype(
    [("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("seed", "u8"), ("position", "u8")], align=True
)


class Ragged(NamedTuple):
    """T tokens of S sequences, computed together; arrays int32.

    ids, pos [T]: token ids and positions; qstart [S+1]: tokens qstart[s] .. qstart[s+1] belong to s, at consecutive
    positions; block_table [S, max_blocks], -1 = unused: position p of s lives in slot p % block_size of block
    block_table[s, p // block_size]; adapters [S]: what add_adapter was given, 0 = none; () = none for all. types [T]:
    of tokens, for a model that has such; None = all 0.
    """

    ids: Ints
    pos: Ints
    qstart: Ints
    block_table: Ints
    adapters: Sequence[int] = ()
    types: Ints | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """What a step found of the rows asked for; valid until the next step.

    tops [R]: 0 = all logits of the row, in `full` [rows with 0, vocab] float32, in order; k = the k largest, largest
    first, of equal ones the smaller token first: values [R, >= k] float32 and ids [R, >= k] int32. states [N, hidden]
    float32: of the tokens whose states were asked for, behind the last norm. tokens [R] int32: what was chosen as the
    rows' next tokens, -1 = nothing; [0] where nothing was asked for, or the backend does not choose.
    """

    tops: list[int]
    full: Floats
    values: Floats
    ids: Ints
    states: Floats
    tokens: Ints


def most_likely(logits: Floats, count: int) -> tuple[Floats, Ids]:
    """The `count` largest of logits [n] and their indices, in the order of Head. count <= n."""
    rank = len(logits) - count
    lowest = np.partition(logits, rank)[rank]
    above = np.flatnonzero(logits > lowest)
    equal = np.flatnonzero(logits == lowest)[: count - len(above)]
    ids = np.sort(np.concatenate((above, equal)))
    ids = ids[np.argsort(-logits[ids], stable=True)]
    return logits[ids], ids


class Draw(Protocol):
    """A random token of one row of logits, as sampler.draw_plain: point in [0, 1) picks from the distribution that
    temperature > 0, then top_p < 1, then min_p > 0 leave."""

    def __call__(self, logits: Floats, temperature: float, top_p: float, min_p: float, point: float) -> int: ...


class Backend(Protocol):
    """Owns the packed weights and the KV cache of one model on one device."""

    name: str
    block_size: int  # tokens a KV block
    num_blocks: int
    kv_bytes: int
    weight_bytes: int
    held_as: str  # how the weights are kept, for people: "in 8 bits"
    kv_layout: str  # how bytes lie in a block of the KV cache, beyond dtype and shape, and how they are computed

    @property
    def draw(self) -> Draw | None:
        """Its own way to draw a token, where it has a faster one than the sampler's."""

    @property
    def kv_parts(self) -> tuple[Any, ...]:
        """The bytes of the KV cache, each part uint8 [layers, 2, num_blocks, bytes of a block].

        Contiguous where a block of the engine's is several of these.
        Arrays where they are in host memory, else tensors of the device.
        """
        ...

    def copy(self, target: Any, source: Any) -> None:
        """Bytes of the KV cache to an array of the same shape in host memory, or back."""

    @property
    def whole_spec(self) -> DecoderSpec:
        """The model's, also where this backend holds a part of it."""

    def add_adapter(self, id: int, adapter: AdapterFile) -> int:
        """Hold an adapter that was read for whole_spec, as `id` > 0. Its bytes. Raises BadRequest."""
        ...

    def drop_adapter(self, id: int) -> None:
        """Unknown ids are ignored."""

    def step(
        self,
        batch: Ragged,
        rows: Ints,
        tops: list[int],
        states: Ints | None = None,
        choices: Choices | None = None,
    ) -> Head:
        """Computes the batch and writes its keys and values; the result for a sequence does not depend on the others.

        rows [R] int32: the tokens whose logits are wanted: all of row r where tops[r] is 0, else the tops[r] <= vocab
        largest. states [N] int32: the tokens whose states are wanted, None = of none. choices [R] of CHOICE. One caller
        at a time. What is given again, the same objects, differs in the numbers of its arrays alone.
        """
        ...
