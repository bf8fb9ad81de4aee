"""What a rank tells of its model: facts of its files and of its backend, put together."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvloom.checkpoints.embedding.pooling import Embedding
from kvloom.contract.messages import RankInfo
from kvloom.rank.drafter import Drafter
from kvloom.rank.host_cache import SwapCache
from kvloom.rank.kernels.backend import Backend


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a runner must know of a model besides its backend's facts."""

    vocab_size: int
    max_seq_len: int  # tokens of prompt and answer
    eos_ids: Sequence[int]
    embedding: Embedding
    lacks: dict[str, str] = field(default_factory=dict)  # of RankInfo
    sees_ahead: bool = False  # of RankInfo
    reach: int = 0  # of RankInfo
    num_snapshots: int = 0  # of the backend's states, those that no running sequence has


def info_of(backend: Backend, facts: ModelFacts, swap: SwapCache, drafter: Drafter | None) -> RankInfo:
    """The RankInfo of a model in `backend`."""
    drafts = (drafter.weight_bytes, drafter.kv_bytes) if drafter is not None else (0, 0)
    return RankInfo(
        num_blocks=backend.num_blocks,
        block_size=backend.block_size,
        vocab_size=facts.vocab_size,
        max_seq_len=facts.max_seq_len,
        backend=backend.name,
        kv_bytes=backend.kv_bytes + drafts[1],
        weight_bytes=backend.weight_bytes,
        num_host_blocks=swap.num_blocks,
        swap_block_s=swap.measure(),
        hidden_size=facts.embedding.num_out,
        pooling=facts.embedding.pooling,
        held_as=backend.held_as,
        lacks=facts.lacks,
        labels=list(facts.embedding.labels),
        activation=facts.embedding.activation,
        sees_ahead=facts.sees_ahead,
        reach=facts.reach,
        takes_again=True,
        num_states=backend.num_states - facts.num_snapshots,
        state_bytes=backend.state_bytes,
        num_snapshots=facts.num_snapshots,
        state_host_blocks=swap.blocks_per_state,
        num_window_blocks=backend.num_window_blocks,
        window_bytes=sum(int(part.nbytes) for part in backend.window_parts),
        draft_bytes=drafts,
        reads_along=drafter is not None and drafter.reads_along,
    )
