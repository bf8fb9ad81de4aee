"""What crosses from the engine to a rank and back, once a step (MessagePack arrays).

A rank keeps the tokens and the sampling state of each sequence; the engine sends only what changed.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from kvloom.engine.request import SamplingParams


class NewSeq(msgspec.Struct, array_like=True):
    """A sequence the rank has not seen. `seed` is resolved: every sequence has one."""

    id: int
    token_ids: list[int]  # the prompt
    params: SamplingParams
    seed: int
    pooling: str = ""  # of Request: an embedding is wanted, no token
    adapter: int = 0  # of LoadAdapter; 0 = the base model


class Work(msgspec.Struct, array_like=True):
    """Compute `num_tokens` tokens of sequence `id` from position `start` on.

    `blocks` replace the sequence's block table from index `first_block` on (0 = a fresh or preempted sequence).
    When start + num_tokens reaches the tokens known so far, the rank samples the next token and appends it. The last
    tokens of the work may be a `draft`, guesses beyond those known: while the token sampled is the one guessed, the
    rank samples the one after it too. `loads`, (host block, block), are copied back before anything is computed.
    """

    id: int
    start: int
    num_tokens: int
    first_block: int
    blocks: list[int]
    draft: list[int] = []
    loads: list[tuple[int, int]] = []


class Transfer(msgspec.Struct, array_like=True):
    """Full blocks to load from the outer KV tier, or to save to it; `keys` name their contents, in chain order.

    The blocks are held for the transfer until the rank reports it in StepOutput.moved.
    """

    id: int
    blocks: list[int]
    keys: list[bytes]


class Batch(msgspec.Struct, array_like=True, tag="batch"):
    """One step: forget `drop`, learn `new`, copy `swap_out` (block, host block), run `work` as one ragged batch.

    `loads` and `saves` begin; without any of all these it only asks which of them are finished.
    """

    new: list[NewSeq]
    work: list[Work]
    drop: list[int]
    swap_out: list[tuple[int, int]] = []
    loads: list[Transfer] = []
    saves: list[Transfer] = []


class Logprob(msgspec.Struct, array_like=True):
    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Sample(msgspec.Struct, array_like=True):
    """A token chosen for sequence `id`, in order when there are several; log-probabilities where asked for."""

    id: int
    token_id: int
    logprob: Logprob | None = None


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of prompt tokens start+1 .. start+len(values) of sequence `id`, one chunk of them."""

    id: int
    start: int
    values: list[Logprob]


class Pooled(msgspec.Struct, array_like=True):
    """The pooled states of sequence `id`, float32: its whole prompt is computed."""

    id: int
    data: bytes


class Moved(msgspec.Struct, array_like=True):
    """Transfer `id` is finished: its first `num_blocks` blocks were moved, the contents of others are unknown."""

    id: int
    num_blocks: int


class StepOutput(msgspec.Struct, array_like=True):
    samples: list[Sample]
    prompt_logprobs: list[PromptLogprobs]
    compute_s: float  # time the rank spent on the step
    moved: list[Moved] = []
    is_tier_up: bool = False  # whether the outer KV tier answers
    pooled: list[Pooled] = []


class RankInfo(msgspec.Struct, array_like=True):
    """What a rank says once its model is loaded."""

    num_blocks: int  # KV blocks it holds
    block_size: int  # tokens a block
    vocab_size: int
    max_seq_len: int  # tokens the model can attend to
    backend: str  # "cpu", "reference", "fake", ...
    kv_bytes: int = 0
    weight_bytes: int = 0
    num_host_blocks: int = 0  # of the pool for what is swapped out
    swap_block_s: float = 0.0  # copying one block to the host or back, measured
    hidden_size: int = 0  # numbers of a token's state, and of an embedding
    pooling: str = "last"  # how the model's embeddings are made; one of pooling.POOLINGS, or none that is known here


class LoadAdapter(msgspec.Struct, array_like=True, tag="load_adapter"):
    """Read the LoRA adapter in folder `path`; sequences name it by `id`, which is above 0 and new."""

    id: int
    path: str


class UnloadAdapter(msgspec.Struct, array_like=True, tag="unload_adapter"):
    """No sequence computes with adapter `id` any more. Not answered; an unknown id is ignored."""

    id: int


class AdapterInfo(msgspec.Struct, array_like=True, frozen=True):
    """What a rank says of an adapter it has loaded."""

    digest: str  # hex SHA-256 of its files
    rank: int  # the largest of its modules
    num_bytes: int  # in this rank's memory


RankOrder = Batch | LoadAdapter | UnloadAdapter


class Runner(Protocol):
    """Runs steps of one model. Owned by one thread of a rank process."""

    info: RankInfo

    @property
    def kv_layers(self) -> Sequence[Sequence[Any]]:
        """The KV cache: for each layer its tensors [blocks, ...] (torch, or anything numpy reads without a copy)."""
        ...

    def run(self, batch: Batch) -> StepOutput: ...

    def rest(self) -> None:
        """The step's output is under way: begin what the next step will need, beside the engine's turn."""

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        """Raises BadRequest when the folder holds no adapter that fits."""
        ...

    def unload_adapter(self, id: int) -> None: ...
