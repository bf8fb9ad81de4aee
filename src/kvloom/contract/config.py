"""EngineConfig: how one model is loaded and run. Limits: the budget of one step."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvloom.contract.errors import BadRequest

BACKENDS = ("auto", "cpu", "reference", "fake")  # of ranks; any other name is a plug-in's
BACKEND_NAMES = {  # as options and files give them
    "default": "auto",
    "auto": "auto",
    "cpu": "cpu",
    "torch": "reference",
    "reference": "reference",
    "mock": "fake",
    "fake": "fake",
}
MTP = "mtp"  # as draft_model: the head in the model's own files (multi-token prediction)
POLICIES = (0, 1, 3)
DTYPES = ("auto", "float32", "bfloat16")
WEIGHT_FORMATS = ("auto", "stored", "w8a8", "w4a8", "bf16")
KV_DTYPES = ("auto", "bf16", "int8")
MAX_BATCH, STEP_TOKENS = 64, 512  # where they are not given
SNAPSHOT_SHARE, MAX_SNAPSHOT_SHARE = 0.25, 0.9
MAX_CRASH_PATIENCE_S = 86_400
MAX_GAP_S = 100
MAX_COUNT = 2**31 - 1  # largest number of tokens, sequences, blocks that kernels and messages can count
MAX_BYTES = 2**62


@dataclass(frozen=True, slots=True)
class Limits:
    """Budget of one step."""

    max_batch: int  # sequences
    max_tokens: int  # tokens, prefill and decode together; at least max_batch, so that every decode fits
    block_size: int  # tokens per KV block
    max_prefill_batch: int = 0  # sequences that prefill; 0 = max_batch
    max_prefill_tokens: int = 0  # prompt tokens; longer prompts take several steps; 0 = max_tokens
    # sequences preempted in a step; 0 = never, admission then reserves whole answers; None = any number
    max_preempt: int | None = None
    prealloc_blocks: int = 0  # blocks reserved for a sequence at admission
    is_continuous: bool = True  # False: a batch ends before the next begins
    is_selecting: bool = False  # weigh prefill against decode by the two times below
    prefill_ms_per_seq: int = 0
    decode_ms_per_seq: int = 0
    max_queue_delay_s: float = 0.0  # how long an incomplete batch is held back while others run
    max_draft_tokens: int = 0  # drafted tokens of a step, shared equally by sequences with drafts

    @property
    def prefill_slots(self) -> int:
        """Sequences that may compute prompts in one step."""
        return self.max_prefill_batch or self.max_batch

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of one step, at most."""
        return self.max_prefill_tokens or self.max_tokens

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise BadRequest("max_batch", f"must be at least 1, got {self.max_batch}")
        if self.max_tokens < self.max_batch:
            raise BadRequest(
                "max_tokens_per_step", f"must be at least max_batch ({self.max_batch}), got {self.max_tokens}"
            )
        if not 0 <= self.max_prefill_batch <= self.max_batch:
            raise BadRequest(
                "max_prefill_batch", f"must be between 0 and max_batch ({self.max_batch}), got {self.max_prefill_batch}"
            )
        if self.max_preempt is not None and not 0 <= self.max_preempt <= self.max_batch:
            raise BadRequest(
                "max_preempt", f"must be between 0 and max_batch ({self.max_batch}), got {self.max_preempt}"
            )
        for name in (
            "max_prefill_tokens",
            "prealloc_blocks",
            "prefill_ms_per_seq",
            "decode_ms_per_seq",
            "max_draft_tokens",
        ):
            if getattr(self, name) < 0:
                raise BadRequest(name, f"must not be negative, got {getattr(self, name)}")
        if not self.max_queue_delay_s >= 0:
            raise BadRequest("max_queue_delay_s", f"must not be negative, got {self.max_queue_delay_s:g}")


@dataclass(frozen=True, slots=True)
class TierConfig:
    """An outer KV tier. `factory` ("module:function") opens it in the rank process, see rank.tier.tier.OpenTier."""

    factory: str
    timeout_s: float = 0.5  # longest time that a request waits for its prefix
    options: Mapping[str, str] = field(default_factory=dict)  # parameters of the factory itself
    is_watched: bool = False  # a debug mode: a wrong byte ends the rank, see rank/tier/watch.py

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.]+:\w+", self.factory):
            raise BadRequest("kv_tier.factory", f"must be module:function, got {self.factory!r}")
        if not 0 < self.timeout_s <= 60:
            raise BadRequest("kv_tier.timeout_s", f"must be above 0, at most 60, got {self.timeout_s:g}")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which model, on what, with how much memory. None = measured or taken from the model at start.

    Raises BadRequest naming the field when a value is out of range.
    """

    model: str = ""  # a folder or a .gguf file; empty for the fake backend
    backend: str = "auto"  # auto = cpu if its library is available, else reference; or a plug-in's name
    device: str = "cpu"
    dtype: str = "auto"  # float32 is computed by the reference backend
    weight_format: str = "auto"  # of the cpu backend; auto: footprint.weight_format
    weight_cache: str = ""  # folder where packed weights are kept, "off"; "" = as the environment says (kept.py)
    kv_dtype: str = (
        "auto"  # of keys and values; auto = bf16 (reference backend: dtype). int8 = one scale for each token and head
    )
    world_size: int = 1  # ranks that share the model, tensor parallel
    device_ids: tuple[int, ...] = ()  # device of each rank, among the visible ones; () = 0, 1, 2, ...
    rank_cores: tuple[tuple[int, ...], ...] = ()  # CPU cores of each rank; () = all that the process may use
    max_seq_len: int | None = None  # tokens, prompt and answer; None = the model's own
    num_blocks: int | None = None  # KV blocks; None = as many as kv_cache_bytes holds
    kv_cache_bytes: int | None = None  # None = a share of the free memory (capacity.py)
    num_host_blocks: int | None = None  # of the pool for what is swapped out; None = as many as host_cache_bytes holds
    host_cache_bytes: int | None = 0  # 0 = preempted sequences are computed again; None = a share of the free memory
    promised_bytes: int = 0  # of this machine's memory, to the caches of other models of the server
    num_sharing: int = 1  # models or replicas, this one included, whose caches of automatic size share the rest
    block_size: int | None = None  # tokens a KV block; None = the backend's own (cpu: 16, and multiples of it)
    max_batch: int = MAX_BATCH
    max_tokens_per_step: int = STEP_TOKENS
    max_gap_s: float | None = None  # longest step while other sequences decode; see pace.py
    max_iter_times: int | None = None  # tokens of any answer; None = as many as the request asks for
    prefill_policy: int = 0  # 0 FCFS, 1 STATE, 3 MLFQ; see policies.py
    decode_policy: int = 0
    fair_token_s: float = 0.0  # seconds of a tenant's share that a token costs; 0 = no fairness between tenants
    max_prefill_batch: int = 0  # these as in Limits
    max_prefill_tokens: int = 0
    max_preempt: int | None = None
    prealloc_blocks: int = 0
    is_continuous: bool = True
    is_selecting: bool = False
    prefill_ms_per_seq: int = 0
    decode_ms_per_seq: int = 0
    max_queue_delay_s: float = 0.0
    num_speculative_tokens: int = -1  # most tokens guessed for a sequence; -1 = lookup.MOST_TOKENS, 0 = off
    draft_model: str = ""  # a folder or a .gguf file: a smaller model that guesses too; MTP; "" = none
    prompt_lookup_min: int = 2  # shortest and longest n-gram that is looked up
    prompt_lookup_max: int = 8
    max_draft_tokens: int = 64  # as in Limits
    enable_prefix_cache: bool = True
    snapshot_share: float = SNAPSHOT_SHARE  # of the cache's memory, for states that others may begin with
    run_ahead: bool = True  # send the step after a decode before the decode's tokens are known
    idle_release_s: float = 300.0  # seconds without work after which unused KV memory is given back; 0 = never
    kv_tier: TierConfig | None = None  # where blocks outlive this engine; needs the prefix cache
    plugin_options: Mapping[str, Any] = field(default_factory=dict)  # options of a plug-in engine, by its own names
    seed: int | None = None  # for requests without one; None = random
    step_timeout_s: float = 300.0  # seconds of a step after which a rank counts as dead
    crash_patience_s: float = 120.0  # seconds that requests wait for a dead rank's successor; 0 = not at all
    fake_step_s: float = 0.0  # fake backend only: time of a step, and of each of its tokens
    fake_token_s: float = 0.0

    def __post_init__(self) -> None:
        _name_of_backend(self.backend)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("weight_format", self.weight_format, WEIGHT_FORMATS)
        _one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        if not self.model and self.backend != "fake":
            raise BadRequest("model", "is missing: give a folder, a .gguf file or the name of a fetched model")
        for name, low in (
            ("max_seq_len", 2),
            ("num_blocks", 2),
            ("kv_cache_bytes", 1),
            ("num_host_blocks", 0),
            ("host_cache_bytes", 0),
            ("block_size", 1),
            ("max_batch", 1),
            ("max_tokens_per_step", 1),
            ("max_iter_times", 1),
            ("world_size", 1),
            ("num_speculative_tokens", -1),
            ("prompt_lookup_min", 1),
            ("prompt_lookup_max", self.prompt_lookup_min),
        ):
            _count(name, getattr(self, name), low)
        if self.world_size > 1 and self.backend == "cpu":
            raise BadRequest("world_size", "the cpu backend's threads share one rank already; leave backend at auto")
        if self.draft_model:
            _check_draft_model(self)
        if self.device.partition(":")[0] not in ("cpu", "cuda", "npu"):
            raise BadRequest("device", f"must be cpu, cuda or npu, got {self.device!r}")
        for name in ("device_ids", "rank_cores"):
            _each_rank(name, getattr(self, name), self.world_size)
        if self.device != "cpu" and self.backend == "cpu":
            raise BadRequest(
                "device", f"the cpu backend computes on the CPU, not on {self.device}; leave backend at auto"
            )
        for name in ("fair_token_s", "idle_release_s"):
            if not getattr(self, name) >= 0:
                raise BadRequest(name, f"must not be negative, got {getattr(self, name):g}")
        _between("snapshot_share", self.snapshot_share, 0, MAX_SNAPSHOT_SHARE)
        _between("max_gap_s", self.max_gap_s or 0, 0, MAX_GAP_S)
        _between("crash_patience_s", self.crash_patience_s, 0, MAX_CRASH_PATIENCE_S)
        for name in ("prefill_policy", "decode_policy"):
            _policy(name, getattr(self, name))
        if self.kv_tier is not None and not self.enable_prefix_cache:
            raise BadRequest("kv_tier", "needs enable_prefix_cache")
        self.limits(block_size=1)

    def limits(self, block_size: int) -> Limits:
        """The budget of a step, for blocks of this size."""
        return Limits(
            self.max_batch,
            self.max_tokens_per_step,
            block_size,
            max_prefill_batch=self.max_prefill_batch,
            max_prefill_tokens=self.max_prefill_tokens,
            max_preempt=self.max_preempt,
            prealloc_blocks=self.prealloc_blocks,
            is_continuous=self.is_continuous,
            is_selecting=self.is_selecting,
            prefill_ms_per_seq=self.prefill_ms_per_seq,
            decode_ms_per_seq=self.decode_ms_per_seq,
            max_queue_delay_s=self.max_queue_delay_s,
            max_draft_tokens=self.max_draft_tokens,
        )


def _check_draft_model(config: EngineConfig) -> None:
    if config.num_speculative_tokens == 0:
        raise BadRequest("draft_model", "has no effect where 0 tokens are guessed ahead")
    if config.backend == "fake":
        raise BadRequest("draft_model", "has no effect with a mock, which has no weights")
    if config.world_size > 1:
        raise BadRequest("draft_model", f"works with one rank, world_size is {config.world_size}")


def _count(name: str, value: int | None, low: int) -> None:
    if value is not None and value < low:
        raise BadRequest(name, f"must be at least {low}, got {value}")
    high = MAX_BYTES if name.endswith("_bytes") else MAX_COUNT
    if value is not None and value > high:
        raise BadRequest(name, f"must be at most {high}, got {value}")


def _name_of_backend(name: str) -> None:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,63}", name):
        raise BadRequest("backend", f"must be the name of a back end, got {name!r}")


def _policy(field: str, value: int) -> None:
    if value not in POLICIES:
        raise BadRequest(field, f"must be 0 (FCFS), 1 (STATE) or 3 (MLFQ), got {value}")


def _between(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadRequest(field, f"must be between {low} and {high}, got {value:g}")


def _each_rank(field: str, given: tuple[object, ...], world_size: int) -> None:
    if given and len(given) != world_size:
        raise BadRequest(field, f"must be as many as world_size ({world_size}), got {len(given)}")


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadRequest(field, f"must be one of {', '.join(allowed)}, got {value!r}")
