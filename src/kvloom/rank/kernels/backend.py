"""The contract between the runner and the kernels: a backend runs a ragged step over a paged KV cache.

Inputs and outputs are arrays in host memory, whatever device computes.
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

# How a backend chooses the token of a row: as sampler.draw_plain does, at the point sampler.uniforms(seed, position),
# from all logits or from the candidates asked for. temperature 0 only where one candidate is asked for.
CHOICE = np.dtype(
    [("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("seed", "u8"), ("position", "u8")], align=True
)


class Ragged(NamedTuple):
    """T tokens of S sequences, computed together; arrays int32.

    ids, pos [T]: token ids and positions; qstart [S+1]: tokens qstart[s] .. qstart[s+1] belong to s, at consecutive
    positions; block_table [S, max_blocks], -1 = unused: position p of s lives in slot p % block_size of block
    block_table[s, p // block_size]; adapters [S]: what add_adapter was given, 0 = none; () = none for all. types [T]:
    of tokens, for a model that has such; None = all 0. places [S]: where each sequence has its state, for a model whose
    layers keep one. It has zeros where a sequence begins, at position 0, whatever was there. windows, of block_table's
    shape: a window's blocks of a backend with such, -1 also behind the window. states [T, hidden]
    float32: what a head that guesses gets with each token; of an assistant, its first layer's input, ids are not read,
    and pos is that of the token before, whose keys are the last that it reads: queries are turned to the one behind.
    """

    ids: Ints
    pos: Ints
    qstart: Ints
    block_table: Ints
    adapters: Sequence[int] = ()
    types: Ints | None = None
    places: Ints | None = None
    windows: Ints | None = None
    states: Floats | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Results of a step for the rows asked for; valid until the next step.

    tops [R]: 0 = all logits of the row, in `full` [rows with 0, vocab] float32, in order; k = the k largest, largest
    first, smaller id first among equals: values [R, >= k] float32 and ids [R, >= k] int32. states [N, hidden] float32:
    states behind the last norm of the tokens asked for. tokens [R] int32: the next tokens that the backend chose, -1 =
    none; [0] where no choice was asked for, or the backend makes none.
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
    """Draws a token of one row of logits, as sampler.draw_plain: point in [0, 1) selects from the distribution after
    temperature > 0, then top_p < 1, then min_p > 0.
    """

    def __call__(self, logits: Floats, temperature: float, top_p: float, min_p: float, point: float) -> int: ...


class Backend(Protocol):
    """Owns the packed weights and the KV cache of one model on one device."""

    name: str
    block_size: int  # tokens a block of the KV cache
    num_blocks: int
    kv_bytes: int
    weight_bytes: int
    held_as: str  # how weights are stored, for people: "in 8 bits"
    num_states: int  # sequences that may have a state at once; 0 = the model's layers keep none
    state_bytes: int  # of one sequence
    num_window_blocks: int  # blocks of the layers that windows.windowed names; 0 = they share those of all layers
    kv_layout: str  # identifies the byte layout of a KV block, and the arithmetic, beyond dtype and shape

    @property
    def draw(self) -> Draw | None:
        """Its own function to draw a token, where it has a faster one than the sampler's; None = use the sampler's."""

    @property
    def kv_parts(self) -> tuple[Any, ...]:
        """The bytes of the KV cache; each part uint8 [num_blocks, bytes of a block].

        Arrays if in host memory, else tensors of the device.
        """
        ...

    @property
    def kv_layers(self) -> list[list[Any]]:
        """The same bytes by layer with keys and values of its own: keys, values, then the scales of both if they have
        some, each uint8 [num_blocks, bytes of a block].
        """
        ...

    @property
    def window_parts(self) -> tuple[Any, ...]:
        """As kv_parts, each [num_window_blocks, bytes of a block]; () without such blocks."""
        ...

    @property
    def window_layers(self) -> list[list[Any]]:
        """As kv_layers, which then leave these layers out."""
        ...

    @property
    def sequence_states(self) -> Any:
        """The bytes of states, uint8 [num_states, state_bytes]: an array if in host memory, else a tensor."""
        ...

    def copy(self, target: Any, source: Any) -> None:
        """Copy bytes of the KV cache to an array of the same shape in host memory, or back."""

    @property
    def whole_spec(self) -> DecoderSpec:
        """The shape of the whole model, also where this backend holds a part of it."""

    def add_adapter(self, id: int, adapter: AdapterFile) -> int:
        """Hold the adapter, which was read for whole_spec, as `id` > 0. Returns its bytes. Raises BadRequest."""
        ...

    def drop_adapter(self, id: int) -> None:
        """Forget an adapter. Unknown ids are ignored."""

    def step(
        self,
        batch: Ragged,
        rows: Ints,
        tops: list[int],
        states: Ints | None = None,
        choices: Choices | None = None,
    ) -> Head:
        """Computes the batch and writes its keys and values. A sequence's result does not depend on the others in the
        batch.

        rows [R] int32: tokens whose logits are wanted; tops [R]: 0 = all logits of the row, else the tops[r] <= vocab
        largest. states [N] int32: tokens whose states are wanted, None = none. choices [R] of CHOICE. Called by one
        thread at a time; the arrays are the backend's from then on.
        """
        ...

    def step_again(
        self, new_blocks: Sequence[tuple[int, int, int]], new_windows: Sequence[tuple[int, int, int]] = ()
    ) -> Ints:
        """The step behind the last one, of the same sequences, whose next tokens the backend has all chosen, one row
        for each: moves ids, positions and choices in that step's arrays on by a token, computes it, and returns the
        tokens that it chooses.

        new_blocks: (sequence, index in its row of block_table, block), which that array need not show; new_windows the
        same for `windows`.
        """
        ...
