"""The `options` of Ollama's requests as sampling parameters. Unknown keys are ignored, as Ollama does.

Integers may be written as 8.0, as clients do whose language has only one kind of number.
"""

from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvloom.contract.errors import BadRequest
from kvloom.contract.sampling import SamplingParams
from kvloom.server.dialects.sampling import Named, bounds

MAX_STOPS = 16
Whole = int | float
# permitted values of unsupported options: those without effect
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "mirostat": (None, 0),
    "tfs_z": (None, 1),
    "penalize_newline": (None, True),
}


class Options(msgspec.Struct, kw_only=True):
    """Parameters neither given nor advised have Ollama's defaults, except repeat_penalty, which is off.

    Without effect: how a model is loaded (num_gpu, num_thread, num_batch, use_mmap, ...) is the server's own matter,
    and num_keep is of a context that is shifted, which this one never is.
    """

    num_predict: Whole | None = None  # 0 and less: until the end
    num_ctx: Whole | None = None
    temperature: Annotated[float, bounds("temperature")] | None = None
    top_k: Whole | None = None  # 0 and less: all
    top_p: Annotated[float, bounds("top_p", opens_low=False)] | None = None
    min_p: Annotated[float, bounds("min_p")] | None = None
    typical_p: Annotated[float, bounds("typical_p")] | None = None
    seed: Whole | None = None  # -1: drawn
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float, bounds("repetition_penalty")] | None = None
    repeat_last_n: Whole | None = None
    presence_penalty: Annotated[float, bounds("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, bounds("frequency_penalty")] | None = None
    mirostat: Whole | None = None
    tfs_z: float | None = None
    penalize_newline: bool | None = None

    def context(self, max_seq_len: int) -> int:
        """Tokens that prompt and answer share. Raises BadRequest."""
        wanted = _whole(self.num_ctx, "num_ctx")
        if wanted is not None and wanted < 2:
            raise BadRequest("options.num_ctx", f"must be at least 2, got {wanted}")
        return min(wanted or max_seq_len, max_seq_len)

    def sampling(self, max_seq_len: int, logprobs: int | None, grammar: str) -> SamplingParams:
        """Raises BadRequest naming the field."""
        for name, neutral in _NEUTRAL.items():
            if getattr(self, name) not in neutral:
                raise BadRequest(f"options.{name}", "is not supported")
        if self.top_p == 0:
            raise BadRequest("options.top_p", "must be above 0; for greedy answers set temperature to 0")
        num_predict, top_k = _whole(self.num_predict, "num_predict") or 0, _whole(self.top_k, "top_k")
        seed = _whole(self.seed, "seed")
        penalties, stop = self._penalties(max_seq_len), self._stops()
        try:
            return NAMED.params(
                self,
                temperature=0.8 if self.temperature is None else self.temperature,
                top_k=40 if top_k is None else max(0, top_k),
                top_p=0.9 if self.top_p is None else self.top_p,
                repetition_penalty=penalties.repeat,
                presence_penalty=penalties.presence,
                frequency_penalty=penalties.frequency,
                max_tokens=num_predict if num_predict > 0 else None,
                stop=stop,
                seed=None if seed == -1 else seed,
                logprobs=logprobs,
                grammar=grammar,
            )
        except BadRequest as error:
            name = "num_predict" if error.field == "max_tokens" else NAMED.names.get(error.field, error.field)
            raise BadRequest(f"options.{name}", error.problem) from None

    def _penalties(self, max_seq_len: int) -> "_Penalties":
        """Over the whole context or not at all: Ollama's window of the last n tokens is not supported."""
        found = _Penalties(self.repeat_penalty or 1.0, self.presence_penalty or 0.0, self.frequency_penalty or 0.0)
        last = _whole(self.repeat_last_n, "repeat_last_n")
        if last == 0:
            return _Penalties()
        if last is not None and 0 < last < max_seq_len and found != _Penalties():
            raise BadRequest(
                "options.repeat_last_n", f"must be -1 (penalties see the whole context) or 0 (none), got {last}"
            )
        return found

    def _stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MAX_STOPS:
            raise BadRequest("options.stop", f"takes up to {MAX_STOPS} texts, got {len(stops)}")
        return stops


@dataclass(frozen=True, slots=True)
class _Penalties:
    repeat: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


NAMED = Named(Options, repetition_penalty="repeat_penalty")


def _whole(value: Whole | None, name: str) -> int | None:
    """Raises BadRequest for a fraction."""
    if value is None or isinstance(value, int):
        return value
    if not value.is_integer():
        raise BadRequest(f"options.{name}", f"must be a whole number, got {value:g}")
    return int(value)
