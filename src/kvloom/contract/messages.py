"""What crosses from the engine to a rank and back, once a step (MessagePack arrays).

A rank keeps the tokens and the sampling state of each sequence; the engine sends only what changed.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from kvloom.contract.config import EngineConfig
from kvloom.contract.request import SamplingParams

Progress = Callable[[int, int], None]  # called with bytes loaded so far, bytes in all


class NewSeq(msgspec.Struct, array_like=True):
    """A sequence the rank has not seen. `seed` is resolved: every sequence has one.

    Another rank, which is gone, may have given it an `answer` as far as it goes: this one continues it.
    """

    id: int
    token_ids: list[int]  # the prompt
    params: SamplingParams
    seed: int
    pooling: str = ""  # of Request: an embedding is wanted, no token
    adapter: int = 0  # of LoadAdapter; 0 = the base model
    answer: list[int] = []
    second: int = 0  # as Request's


class Work(msgspec.Struct, array_like=True):
    """Compute `num_tokens` tokens of sequence `id` from position `start` on.

    `blocks` replace the sequence's block table from index `first_block` on (0 = a fresh or preempted sequence).
    When start + num_tokens reaches the tokens known so far, the rank samples the next token and appends it. The last
    tokens of the work may be a `draft`, guesses beyond those known: while the token sampled is the one guessed, the
    rank samples the one after it too. `loads`, (host block, block), are copied back before anything is computed.

    A batch may be sent while the one before it runs: its work begins at the token that the rank then chooses. When none
    was chosen for the sequence, nothing of that work is computed.
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

    `loads` and `saves` begin; without any of all these it only asks which of them are finished. Nobody needs what the
    blocks of `release` hold: their memory goes back to the system until they are written again.
    """

    new: list[NewSeq]
    work: list[Work]
    drop: list[int]
    swap_out: list[tuple[int, int]] = []
    loads: list[Transfer] = []
    saves: list[Transfer] = []
    release: list[int] = []


class Logprob(msgspec.Struct, array_like=True):
    """A token's natural log-probability, and the most likely tokens in its stead: (id, log-probability), best first."""

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


class GivenUp(msgspec.Struct, array_like=True):
    """Sequence `id` gets no further token: its grammar cannot be followed any more."""

    id: int
    error: str


class Moved(msgspec.Struct, array_like=True):
    """Transfer `id` is finished: its first `num_blocks` blocks were moved, the contents of others are unknown."""

    id: int
    num_blocks: int


class StepOutput(msgspec.Struct, array_like=True):
    """What one step brought; sequences in the order of the batch's work, each list empty where nothing was due."""

    samples: list[Sample]
    prompt_logprobs: list[PromptLogprobs]
    compute_s: float  # time the rank spent on the step
    moved: list[Moved] = []
    is_tier_up: bool = False  # whether the outer KV tier answers
    pooled: list[Pooled] = []
    given_up: list[GivenUp] = []
    pool: str = ""  # which one that tier is, once it is known

    def by_sequence(self) -> dict[int, list[Sample]]:
        """The samples of each sequence whose known tokens are all computed; of one that is pooled there are none."""
        found: dict[int, list[Sample]] = {pooled.id: [] for pooled in self.pooled}
        for sample in self.samples:
            found.setdefault(sample.id, []).append(sample)
        return found


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
    held_as: str = ""  # how the weights are kept, for people
    lacks: dict[str, str] = {}  # of capabilities.FEATURES those that it has not, and why
    kv_model: str = ""  # what the outer KV tier's blocks are named after: weights and shape,
    kv_layout: str = ""  # and how they are computed and arranged; "" without such a tier
    sees: bool = False  # requests may have a Sight
    reach: int = 0  # tokens that one reads, itself among them, where every layer has a window; 0 = all before it
    image_text: str = ""  # what stands for an image in a text, where the chat template takes no parts; "" = unknown
    labels: list[str] = []  # of a classifier: a pooled vector has a number for each
    activation: str = ""  # pooling.scores makes scores of those
    sees_ahead: bool = False  # tokens see those behind them: a prompt is computed in one step, nothing of it is kept

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        """What all ranks of a model must have alike, since the engine names blocks once for all."""
        return self.num_blocks, self.block_size, self.kv_bytes, self.num_host_blocks


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


class RankSetup(msgspec.Struct, array_like=True):
    """The first message to a rank."""

    config: EngineConfig
    eos_ids: list[int]
    rank: int = 0
    rendezvous: str = ""  # a file where the ranks of one model meet


class Loading(msgspec.Struct, array_like=True, tag="loading"):
    """How far a rank is with its weights."""

    done_bytes: int
    total_bytes: int


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The model is loaded; the first order may come."""

    info: RankInfo


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The model cannot be loaded, or a step raised; the rank ends after this."""

    error: str


class Done(msgspec.Struct, array_like=True, tag="done"):
    """Answers one Batch."""

    output: StepOutput


class AdapterLoaded(msgspec.Struct, array_like=True, tag="adapter"):
    """Answers a LoadAdapter."""

    info: AdapterInfo


class AdapterRefused(msgspec.Struct, array_like=True, tag="refused"):
    """Answers a LoadAdapter that cannot be followed, with the parts of a BadRequest; the rank goes on."""

    field: str
    problem: str


RankOrder = Batch | LoadAdapter | UnloadAdapter  # to a rank, after its RankSetup
RankMessage = Loading | Ready | Failed | Done | AdapterLoaded | AdapterRefused  # from a rank


class Runner(Protocol):
    """Runs steps of one model. Owned by one thread of a rank process."""

    info: RankInfo

    @property
    def kv_layers(self) -> Sequence[Sequence[Any]]:
        """The KV cache: for each layer its tensors [blocks, ...] (torch, or anything numpy reads without a copy)."""
        ...

    def run(self, batch: Batch) -> StepOutput:
        """One step: learn and forget sequences, move blocks, compute `batch.work`, sample.

        Returns the samples of every sequence whose known tokens are all computed, in the order of `batch.work`. An
        exception ends the rank: what its caches hold is unknown after it.
        """
        ...

    def prepare_next(self) -> None:
        """The step's output is under way: begin what the next step will need, beside the engine's turn."""

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        """Raises BadRequest when the folder holds no adapter that fits."""
        ...

    def unload_adapter(self, id: int) -> None:
        """Free adapter `id`, which no sequence uses any more; unknown ids are ignored."""
