"""Sampling parameters: each is one field of SamplingParams, and its Row says all that is the same wherever it is read.

Ranges, what an engine may lack, what models' files advise, what vLLM is told, and the bodies of the dialects follow
from the rows when they are imported.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from kvloom.contract.config import MAX_COUNT
from kvloom.contract.errors import BadRequest

MAX_LOGPROBS = 20
GREEDY_BELOW = 1e-5  # lower temperatures only choose among equal logits, and overflow float32
Kind = Literal["shapes", "cuts", "draws", "ends", "reports"]


@dataclass(frozen=True, slots=True)
class Row:
    """What is said of a parameter beside its name, its type and its default, which switches it off.

    kind: it shapes the probabilities of tokens, cuts tokens off, draws one of those left, ends the answer, reports it.
    """

    kind: Kind
    low: float | None = None  # of numbers: both bounds are permitted, None = any value
    high: float | None = None
    opens_low: bool = False  # `low` itself is not permitted
    is_composed: bool = False  # dialects make it of several fields, so they do not pass on a field of its name
    is_always: bool = False  # every engine has it: it is the server's own work, or the minimum of any model
    counts_answer: bool = False  # the next token then depends on where the answer begins, not on the tokens alone
    word: str = ""  # the caller's word for it in errors; "" = its name
    gguf: str = ""  # models' files may advise it: its key in a GGUF file, below general.sampling
    vllm: str = ""  # vLLM's name, which OpenAI's bodies share; "" = the same
    lacks_vllm: str = ""  # why vLLM has none like it

    def problem(self, value: float) -> str:
        """What is wrong with a number; "" = nothing."""
        if self.low is None or self.high is None or (self.least <= value <= self.high):
            return ""  # NaN is within no range
        if value == self.low:
            return f"must be above {self.low:.15g}"
        return f"must be between {self.low:.15g} and {self.high:.15g}, got {_number(value)}"

    @property
    def least(self) -> float:
        """The smallest permitted number."""
        assert self.low is not None
        return math.nextafter(self.low, math.inf) if self.opens_low else self.low


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when to stop. Defaults switch a rule off.

    temperature 0 is greedy, and so is one below GREEDY_BELOW.
    logprobs: None = none, 0 = of the chosen token only, n = and of the n most likely ones (at most 20);
    prompt_logprobs likewise for every prompt token from position scored_from on; those before it may come from the
    cache. Log-probabilities are of the raw distribution.
    seed None = drawn by the engine. max_tokens None = until the context is full.
    Raises BadRequest when a value is outside its range.
    """

    temperature: Annotated[float, Row("shapes", 0, 100, is_always=True, gguf="temp")] = 1.0
    top_k: Annotated[int, Row("cuts", 0, MAX_COUNT, gguf="top_k")] = 0
    top_p: Annotated[float, Row("cuts", 0, 1, opens_low=True, gguf="top_p")] = 1.0
    min_p: Annotated[float, Row("cuts", 0, 1, gguf="min_p")] = 0.0
    typical_p: Annotated[float, Row("cuts", 0, 1, opens_low=True, lacks_vllm="vLLM has no typical sampling")] = 1.0
    repetition_penalty: Annotated[float, Row("shapes", 0, 100, opens_low=True, gguf="penalty_repeat")] = 1.0
    frequency_penalty: Annotated[float, Row("shapes", -2, 2, counts_answer=True)] = 0.0
    presence_penalty: Annotated[float, Row("shapes", -2, 2, counts_answer=True)] = 0.0
    # token id -> added to its logit
    logit_bias: Annotated[Mapping[int, float], Row("shapes", is_composed=True)] = field(default_factory=dict)
    max_tokens: Annotated[int | None, Row("ends", 0, MAX_COUNT, is_always=True, is_composed=True)] = None
    min_tokens: Annotated[int, Row("ends", 0, MAX_COUNT)] = 0
    stop: Annotated[tuple[str, ...], Row("ends", is_composed=True)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Row("ends")] = ()
    # keep the stop string in the text
    include_stop: Annotated[bool, Row("reports", is_always=True, vllm="include_stop_str_in_output")] = False
    ignore_eos: Annotated[bool, Row("ends")] = False
    seed: Annotated[int | None, Row("draws", -(2**63), 2**64 - 1)] = None
    logprobs: Annotated[int | None, Row("reports", 0, MAX_LOGPROBS, is_composed=True)] = None
    prompt_logprobs: Annotated[int | None, Row("reports", 0, MAX_LOGPROBS, is_composed=True)] = None
    scored_from: Annotated[int, Row("reports", 0, MAX_COUNT, is_composed=True)] = 0
    # tokens whose log-probability is reported in addition to the most likely ones, with logprobs; with max_tokens 0
    # that of following the prompt
    logprob_ids: Annotated[tuple[int, ...], Row("reports", is_composed=True)] = ()
    skip_special_tokens: Annotated[bool, Row("reports", is_always=True)] = True
    watermark: Annotated[
        bool, Row("shapes", lacks_vllm="vLLM's watermarks are not those of the text generation interface")
    ] = False
    # grammar of the answer in llguidance's form; "" = unrestricted
    grammar: Annotated[str, Row("cuts", is_composed=True, counts_answer=True, word="response_format")] = ""
    # reasoning tokens before reasoning_end is forced; None = no limit
    max_reasoning_tokens: Annotated[
        int | None,
        Row(
            "ends", 0, MAX_COUNT, is_composed=True, word="thinking",
            lacks_vllm="a limit of reasoning tokens is not passed on to vLLM",
        ),
    ] = None  # fmt: skip
    # ends the reasoning with which the answer begins; then the grammar begins
    reasoning_end: Annotated[
        str,
        Row(
            "ends", is_composed=True, counts_answer=True, word="response_format",
            lacks_vllm="vLLM has no grammar that begins behind the reasoning; turn reasoning off, or the format",
        ),
    ] = ""  # fmt: skip

    def __post_init__(self) -> None:
        for name, least, high in _RANGES:
            value = getattr(self, name)
            if value is not None and not least <= value <= high:  # NaN fails the comparison too
                raise BadRequest(name, ROWS[name].problem(value))
        if not all(self.stop):
            raise BadRequest("stop", "a stop string must not be empty")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken, so no seed matters."""
        return self.temperature < GREEDY_BELOW or self.top_k == 1


def _number(value: float) -> str:
    """For people; an integer may be too large for a float."""
    return (
        f"{value:.15g}" if isinstance(value, float) or abs(value) < 2**64 else f"a number of {value.bit_length()} bits"
    )


def _row(annotated: Any) -> Row:
    (row,) = annotated.__metadata__
    assert isinstance(row, Row)
    return row


ROWS: Mapping[str, Row] = {each.name: _row(each.type) for each in fields(SamplingParams)}
_RANGES = tuple((name, row.least, row.high) for name, row in ROWS.items() if row.low is not None)
PLAIN = SamplingParams()
OFF: Mapping[str, Any] = {name: getattr(PLAIN, name) for name in ROWS}  # what switches each off


def is_asked(params: SamplingParams, name: str) -> bool:
    """Whether the parameter of that name is not at its default."""
    return bool(getattr(params, name) != OFF[name])


def advice_text(advice: Mapping[str, float]) -> str:
    """Sampling parameters that a model's makers advise, for people."""
    return ", ".join(f"{name} {value:g}" for name, value in advice.items())
