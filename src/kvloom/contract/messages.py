"""Messages from the engine to a rank and back, once a step (MessagePack arrays).

A rank keeps the tokens and the sampling state of each sequence; the engine only sends changes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import msgspec

from kvloom.contract.config import EngineConfig
from kvloom.contract.lifecycle import Failed, Loading, Ready
from kvloom.contract.sampling import SamplingParams
from kvloom.contract.states import FoundState, KeptState, Search
from kvloom.contract.windows import WindowBlocks

Progress = Callable[[int, int], None]  # called with bytes loaded so far, and bytes in all
BY_MODEL = -1  # in Work.draft: the token that the rank's draft model guesses


class NewSeq(msgspec.Struct, array_like=True):
    """A sequence that the rank does not know. `seed` is resolved: every sequence has one.

    `answer`: its first tokens, sampled by a rank that has died; this rank continues behind them.
    """

    id: int
    token_ids: list[int]  # the prompt
    params: SamplingParams
    seed: int
    pooling: str = ""  # as in Request: an embedding is wanted, no token
    adapter: int = 0  # id of LoadAdapter; 0 = the base model
    answer: list[int] = []
    second: int = 0  # as in Request
    adapter_from: int = 0  # position from which on the adapter acts; no work has tokens on both sides of it
    is_guessed: bool = False  # StepOutput.forced is wanted


class Work(msgspec.Struct, array_like=True):
    """Compute `num_tokens` tokens of sequence `id` from position `start` on.

    `blocks` replace the sequence's block table from index `first_block` on (0 = a fresh or preempted sequence). When
    start + num_tokens reaches the tokens known so far, the rank samples the next token and appends it. The last tokens
    of the work may be a `draft` beyond those known: as long as the sampled token equals the drafted one, the rank
    samples the next one too. `loads`, (host block, block), are copied back before anything is computed, and so is the
    block `copied`, if it is not -1, into the block in which the work starts. `windows`, where layers with a window
    have blocks of their own: those of the same tokens as `blocks`, -1 = behind the window; `window_loads` and
    `copied_window` are for them what `loads` and `copied` are for the others. A sequence that comes back from the host
    has its state in the host blocks `state_loads`.

    A batch may be sent while the one before it runs: its work then begins at the token that the rank will choose. If
    none is chosen for the sequence, that work is skipped.
    """

    id: int
    start: int
    num_tokens: int
    first_block: int
    blocks: list[int]
    draft: list[int] = []
    loads: list[tuple[int, int]] = []
    state: int = -1
    copied: int = -1
    begun: int = -1
    kept: int = -1
    windows: list[int] = []
    window_loads: list[tuple[int, int]] = []
    copied_window: int = -1
    state_loads: list[int] = []


class Transfer(msgspec.Struct, array_like=True):
    """Full blocks to load from the outer KV tier, or to save to it; `keys` name their contents, in chain order.

    The blocks are held for the transfer until the rank reports it in StepOutput.moved. With a `search`, of a load,
    blocks are loaded as far as a state is found. The `state` of a save, which then has no blocks, is copied before the
    batch computes anything. The same holds for `windows` of a save; with those of a load, blocks are loaded as far as
    a window's are found.
    """

    id: int
    blocks: list[int]
    keys: list[bytes]
    search: Search | None = None
    state: KeptState | None = None
    windows: WindowBlocks | None = None


class Batch(msgspec.Struct, array_like=True, tag="batch"):
    """One step: start `loads` and `saves`, write the states that transfers have `found`, forget `drop`, learn `new`,
    copy `swap_out` (block, host block), run `work` as one ragged batch. An empty batch only asks which transfers have
    ended. The contents of `release` are not needed any more: the blocks' memory goes back to the system until they are
    written again.

    `again`: each sequence of the last batch that had work computes one more token, behind that work, in the same order.
    `work` then holds only those that get blocks. Sent to a rank whose RankInfo says takes_again.

    `draft_room`: tokens that the draft model may compute of texts that it has not read, before it guesses.
    """

    new: list[NewSeq]
    work: list[Work]
    drop: list[int]
    swap_out: list[tuple[int, int]] = []
    loads: list[Transfer] = []
    saves: list[Transfer] = []
    release: list[int] = []
    again: bool = False
    swap_out_windows: list[tuple[int, int]] = []  # the same of a window's blocks, into the same host blocks
    release_windows: list[int] = []
    swap_out_states: list[tuple[int, list[int]]] = []  # (place of a state, host blocks for its pieces)
    found: list[FoundState] = []
    draft_room: int = 0


class Logprob(msgspec.Struct, array_like=True):
    """A token's natural log-probability, and those of the most likely tokens: (id, log-probability), best first."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]


class Sample(msgspec.Struct, array_like=True):
    """A token chosen for sequence `id`, in order when there are several; log-probabilities where asked for."""

    id: int
    token_id: int
    logprob: Logprob | None = None


class PromptLogprobs(msgspec.Struct, array_like=True):
    """Log-probabilities of prompt tokens start+1 .. start+len(values) of sequence `id`, for one chunk."""

    id: int
    start: int
    values: list[Logprob]


class Pooled(msgspec.Struct, array_like=True):
    """The pooled states of sequence `id`, float32, after its whole prompt."""

    id: int
    data: bytes


class GivenUp(msgspec.Struct, array_like=True):
    """Sequence `id` gets no further token: its grammar cannot be followed."""

    id: int
    error: str


class Forced(msgspec.Struct, array_like=True):
    """Tokens that the grammar of sequence `id` forces behind those chosen so far, as it would cut them."""

    id: int
    token_ids: list[int]


class Drafted(msgspec.Struct, array_like=True):
    """The draft of sequence `id` whose work had a BY_MODEL; the draft model has read `num_known` tokens of it."""

    id: int
    token_ids: list[int]
    num_known: int


class DraftLoad(msgspec.Struct, array_like=True):
    """What the draft model has computed in a step, in passes one after the other."""

    num_passes: int = 0
    num_tokens: int = 0
    num_samples: int = 0  # rows whose logits were computed
    num_pairs: int = 0  # (query, key) pairs of attention
    seconds: float = 0.0


class Moved(msgspec.Struct, array_like=True):
    """Transfer `id` has ended: its first `num_blocks` blocks were moved, the contents of the others are undefined.

    `position`: tokens before the state that a search has found, which waits for a FoundState, or before which a
    window's blocks were loaded; 0 = none.
    """

    id: int
    num_blocks: int
    position: int = 0


class StepOutput(msgspec.Struct, array_like=True):
    """Results of one step; sequences in the order of the batch's work. Lists are empty where nothing was asked for.

    `tokens` takes the place of `samples` where every sequence of the work has got one token, without log-probabilities.
    """

    samples: list[Sample]
    prompt_logprobs: list[PromptLogprobs]
    compute_s: float  # seconds that the rank computed
    moved: list[Moved] = []
    is_tier_up: bool = False  # whether the outer KV tier is up
    pooled: list[Pooled] = []
    given_up: list[GivenUp] = []
    pool: str = ""  # name of that tier's store, once known
    tokens: list[int] = []
    forced: list[Forced] = []  # of sequences with NewSeq.is_guessed, where anything is forced
    drafts: list[Drafted] = []
    draft_load: DraftLoad | None = None  # its seconds are a part of compute_s

    def by_sequence(self, ids: Iterable[int]) -> dict[int, list[Sample]]:
        """The samples of each sequence whose known tokens are all computed; none for sequences that are pooled.

        `ids`: the sequences of the batch's work.
        """
        if self.tokens:
            return {id: [Sample(id, token_id)] for id, token_id in zip(ids, self.tokens, strict=True)}
        found: dict[int, list[Sample]] = {pooled.id: [] for pooled in self.pooled}
        for sample in self.samples:
            found.setdefault(sample.id, []).append(sample)
        return found


class RankInfo(msgspec.Struct, array_like=True):
    """Sent by a rank once its model is loaded."""

    num_blocks: int  # KV blocks that it has
    block_size: int  # tokens a block
    vocab_size: int
    max_seq_len: int  # most tokens that the model can attend to
    backend: str  # "cpu", "reference", "fake", ...
    kv_bytes: int = 0
    weight_bytes: int = 0
    num_host_blocks: int = 0  # blocks of the host pool
    swap_block_s: float = 0.0  # seconds to copy one block to the host or back, measured
    hidden_size: int = 0  # numbers in a token's state, and in an embedding
    pooling: str = "last"  # the model's pooling: see pooling.modes_of, or one unknown here
    held_as: str = ""  # how weights are stored, for people
    lacks: dict[str, str] = {}  # feature of capabilities.FEATURES that it lacks -> the reason
    kv_model: str = ""  # identity of KV blocks in the outer tier: weights and shape,
    kv_layout: str = ""  # and arithmetic and byte layout; "" without a tier
    sees: bool = False  # requests may have a Sight
    # how many tokens back a step reads in layers with a window, the token itself included
    reach: int = 0
    image_text: str = ""  # an image's placeholder in texts, if the chat template takes no parts; "" = unknown
    labels: list[str] = []  # of a classifier: a pooled vector has one number for each
    activation: str = ""  # pooling.scores turns these numbers into scores
    # tokens attend to later ones: a prompt is computed in one step, and its blocks are not cached
    sees_ahead: bool = False
    takes_again: bool = False  # Batch.again may be sent
    num_states: int = 0  # sequences that may run at once, each with a state, if layers keep one; 0 = they do not
    state_bytes: int = 0  # of one sequence
    num_snapshots: int = 0  # states that may be kept besides, for others to begin with
    state_host_blocks: int = 0  # host blocks that a state takes when its sequence is swapped out
    num_window_blocks: int = 0  # blocks of layers with a window; 0 = these have all tokens in the blocks of all layers
    window_bytes: int = 0  # of kv_bytes, those of these blocks
    draft_bytes: tuple[int, int] = (0, 0)  # of the draft model: weights; of kv_bytes, those of its keys and values
    reads_along: bool = False  # the draft model lacks little of a text when it is asked

    @property
    def block_bytes(self) -> tuple[int, int]:
        """Of a block of all tokens, and of one of a window's: what is swapped and kept elsewhere, so without the draft
        model's part.
        """
        all_bytes = (self.kv_bytes - self.window_bytes - self.draft_bytes[1]) // max(1, self.num_blocks)
        return all_bytes, self.window_bytes // max(1, self.num_window_blocks)

    @property
    def cache_shape(self) -> tuple[int, ...]:
        """Must be equal for all ranks of a model, because the engine's block numbers hold for all."""
        return (
            self.num_blocks,
            self.block_size,
            self.kv_bytes,
            self.num_host_blocks,
            self.num_states,
            self.num_snapshots,
            self.num_window_blocks,
        )


class LoadAdapter(msgspec.Struct, array_like=True, tag="load_adapter"):
    """Read the LoRA adapter in folder `path`; sequences name it by `id`, which is above 0 and new."""

    id: int
    path: str


class UnloadAdapter(msgspec.Struct, array_like=True, tag="unload_adapter"):
    """No sequence uses adapter `id` any more. Not answered; an unknown id is ignored."""

    id: int


class AdapterInfo(msgspec.Struct, array_like=True, frozen=True):
    """Facts of a loaded adapter."""

    digest: str  # hex SHA-256 of its files
    rank: int  # the largest rank of its modules
    num_bytes: int  # bytes in this rank
    invocation: list[int] = []  # of AdapterFile


class RankSetup(msgspec.Struct, array_like=True):
    """The first message to a rank."""

    config: EngineConfig
    eos_ids: list[int]
    rank: int = 0
    rendezvous: str = ""  # a file where the ranks of one model meet


class Done(msgspec.Struct, array_like=True, tag="done"):
    """Answers one Batch."""

    output: StepOutput


class AdapterLoaded(msgspec.Struct, array_like=True, tag="adapter"):
    """Answers a LoadAdapter."""

    info: AdapterInfo


class AdapterRefused(msgspec.Struct, array_like=True, tag="refused"):
    """Answers a LoadAdapter that failed, with the parts of a BadRequest; the rank continues."""

    field: str
    problem: str


RankOrder = Batch | LoadAdapter | UnloadAdapter  # to a rank, after its RankSetup
RankMessage = Loading | Ready[RankInfo] | Failed | Done | AdapterLoaded | AdapterRefused  # from a rank


class Runner(Protocol):
    """Runs steps of one model. Owned by one thread of a rank process."""

    info: RankInfo

    @property
    def kv_layers(self) -> Sequence[Sequence[Any]]:
        """The KV cache: for each layer its tensors [blocks, ...] (torch, or anything numpy reads without a copy)."""
        ...

    @property
    def window_layers(self) -> Sequence[Sequence[Any]]:
        """The same of layers with a window, if these have blocks of their own; else none."""
        ...

    def run(self, batch: Batch) -> StepOutput:
        """One step: learn and forget sequences, move blocks, compute `batch.work`, sample.

        Returns the samples of every sequence whose known tokens are all computed, in the order of `batch.work`. After
        an exception the rank's caches are undefined, so it ends.
        """
        ...

    def prepare_next(self) -> None:
        """Called when the step's output is being sent: start work for the next step while the engine is busy."""

    def load_adapter(self, id: int, path: str) -> AdapterInfo:
        """Raises BadRequest when the folder holds no adapter that fits."""
        ...

    def unload_adapter(self, id: int) -> None:
        """Free adapter `id`, which no sequence uses any more; unknown ids are ignored."""
