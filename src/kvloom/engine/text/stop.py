"""When an answer ends: end-of-sequence and stop tokens, its length, stop strings."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from kvloom.contract.request import FinishReason
from kvloom.contract.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class Ends:
    """When any sequence of a model ends, whatever the request asks for."""

    eos_ids: AbstractSet[int]
    max_seq_len: int  # tokens of prompt and answer together


def finish_of(
    token_id: int, num_prompt: int, num_output: int, params: SamplingParams, ends: Ends
) -> FinishReason | None:
    """Why a sequence ends with `token_id`, or None. `num_output` counts the answer's tokens, this one included."""
    if num_output >= params.min_tokens:
        if token_id in ends.eos_ids and not params.ignore_eos:
            return FinishReason.EOS
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
    if num_prompt + num_output >= ends.max_seq_len:
        return FinishReason.LENGTH
    return FinishReason.LENGTH if params.max_tokens is not None and num_output >= params.max_tokens else None


class StopStrings:
    """Finds the first of several stop strings in text that arrives in pieces.

    The string that is complete first wins, and of several the longest, so the result does not depend on the pieces.
    Text that may be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, stops: Sequence[str], is_included: bool = False, num_exempt: int = 0) -> None:
        """`num_exempt`: pieces at the beginning in which no stop string may end."""
        self.matched: str | None = None
        self._stops = stops
        self._is_included = is_included
        self._num_exempt = num_exempt
        self._held = ""

    def add(self, text: str) -> str:
        """The part of the text that may be released now. After a match (`matched`) nothing more is."""
        if not self._stops:
            return text
        num_held, text = len(self._held), self._held + text
        begins = ((stop, text.find(stop, max(0, num_held + 1 - len(stop)))) for stop in self._stops)
        found = [(index + len(stop), index, stop) for stop, index in begins if index >= 0]
        if self._num_exempt:
            self._num_exempt -= 1
        elif found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._is_included else start]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-length:]):
            return length
    return 0
