"""EngineConfig: how one model is loaded and run. Limits: the budget of one step."""

from dataclasses import dataclass

from kvloom.engine.errors import BadRequest

BACKENDS = ("auto", "cpu", "reference", "fake")
DTYPES = ("auto", "float32", "bfloat16")
WEIGHT_FORMATS = ("auto", "w8a8", "w4a8", "bf16")


@dataclass(frozen=True, slots=True)
class Limits:
    """Budget of one step."""

    max_batch: int  # sequences
    max_tokens: int  # tokens, prefill and decode together; at least max_batch, so that every decode fits
    block_size: int  # tokens per KV block

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise BadRequest("max_batch", f"must be at least 1, got {self.max_batch}")
        if self.max_tokens < self.max_batch:
            raise BadRequest(
                "max_tokens_per_step", f"must be at least max_batch ({self.max_batch}), got {self.max_tokens}"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Which model, on what, with how much memory. None = measured or taken from the model at start.

    Raises BadRequest naming the field when a value is out of range.
    """

    model: str = ""  # a folder or a .gguf file; empty for the fake backend
    backend: str = "auto"  # auto = cpu where its library can be had, else reference
    device: str = "cpu"
    dtype: str = "auto"  # float32 takes the reference backend
    weight_format: str = "auto"  # of the cpu backend; auto = w8a8, or bf16 with that dtype
    max_seq_len: int | None = None  # tokens, prompt and answer; None = the model's own
    num_blocks: int | None = None  # KV blocks; None = as many as kv_cache_bytes holds
    kv_cache_bytes: int | None = None  # None = a share of the free memory
    max_batch: int = 64
    max_tokens_per_step: int = 512
    enable_prefix_cache: bool = True
    seed: int | None = None  # of requests that bring none; None = drawn from the system
    step_timeout_s: float = 300.0  # a rank that takes longer is taken for dead
    fake_step_s: float = 0.0  # fake backend only: time of a step, and of each of its tokens
    fake_token_s: float = 0.0

    def __post_init__(self) -> None:
        _one_of("backend", self.backend, BACKENDS)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("weight_format", self.weight_format, WEIGHT_FORMATS)
        if not self.model and self.backend != "fake":
            raise BadRequest("model", "is missing: give a folder, a .gguf file or the name of a fetched model")
        for name, low in (("max_seq_len", 2), ("num_blocks", 2), ("kv_cache_bytes", 1), ("max_batch", 1)):
            value = getattr(self, name)
            if value is not None and value < low:
                raise BadRequest(name, f"must be at least {low}, got {value}")
        Limits(self.max_batch, self.max_tokens_per_step, block_size=1)


def _one_of(field: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadRequest(field, f"must be one of {', '.join(allowed)}, got {value!r}")
