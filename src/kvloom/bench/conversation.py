"""The scenario `conversation`: a script of requests that continue, leave and repeat earlier ones, one at a time.

All of it begins with the same instructions. A conversation takes its turns; its last answer is asked for again; a
message in its middle is edited; a loop of tool calls goes on from its end; other conversations part behind the
instructions, and each takes a second turn when all have had their first. Prompts are token ids, and each contains the
answers that the server gave. So it is known which tokens the server has computed before, in any request, and how many
of them it computes again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvloom.bench.client import BenchError, Target, complete, way_to_ids
from kvloom.bench.load import TOKEN_IDS, Progress, draw

KINDS = ("turn", "regenerated", "edited", "tool call", "branch", "second turn")
NUM_CALLS = 4


@dataclass(frozen=True, slots=True)
class Script:
    """Lengths in tokens. A tool's result is as long as four messages, a call as a quarter of an answer."""

    num_turns: int = 12
    num_branches: int = 16
    shared_len: int = 1200  # the instructions with which all conversations begin
    input_len: int = 60  # of a message
    output_len: int = 200  # of an answer
    token_ids: tuple[int, int] = TOKEN_IDS  # [low, high)

    def __post_init__(self) -> None:
        for name in ("num_turns", "num_branches", "shared_len", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise BenchError(f"{name}: {getattr(self, name)} is below 1")
        low, high = self.token_ids
        if not 0 <= low < high:
            raise BenchError(f"token_ids: {low},{high} is no range LOW,HIGH with 0 <= LOW < HIGH")

    @property
    def num_requests(self) -> int:
        return self.num_turns + 2 + NUM_CALLS + 2 * self.num_branches


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request; all numbers but the times are tokens."""

    kind: str  # of KINDS
    number: int  # the how-manieth of its kind, from 1
    num_prompt: int
    num_new: int  # of the prompt behind what earlier prompts and answers begin with; at least the last one
    num_cached: int  # as the server says
    ttft_ms: float
    tpot_ms: float

    @property
    def num_recomputed(self) -> int:
        """Tokens of the prompt that were computed although they had been computed before."""
        return max(0, self.num_prompt - self.num_cached - self.num_new)


class Player:
    """Plays a script. Played again, as after a restart of the server, everything of it is known."""

    def __init__(self, script: Script, seed: str) -> None:
        """The script's messages are a function of the seed."""
        self._script, self._seed = script, seed
        self._known: list[Sequence[int]] = []  # each prompt with its answer
        self._found: list[Exchange] = []

    async def play(self, target: Target, progress: Progress | None = None) -> list[Exchange]:
        """The script's requests in order. Raises BenchError where the server does not say what is needed."""
        self._found = []
        script, shared = self._script, self._text("shared", self._script.shared_len)
        more = await way_to_ids(target, [script.token_ids[0]] * 16)

        async def answer(kind: str, prompt: Sequence[int], length: int = script.output_len) -> list[int]:
            whole = await self._answer(target, kind, prompt, length, more)
            if progress:
                progress()
            return whole

        history, edited = shared, shared
        for turn in range(script.num_turns):
            edited = history if turn == script.num_turns // 2 else edited
            prompt = [*history, *self._message(f"turn-{turn}")]
            history = await answer("turn", prompt)
        await answer("regenerated", prompt)
        await answer("edited", [*edited, *self._message("edited")])
        for call in range(NUM_CALLS):
            told = self._text(f"call-{call}", 4 * script.input_len)
            history = await answer("tool call", [*history, *told], max(1, script.output_len // 4))
        branches = [
            await answer("branch", [*shared, *self._message(f"branch-{i}")]) for i in range(script.num_branches)
        ]
        for i, branch in enumerate(branches):
            await answer("second turn", [*branch, *self._message(f"second-{i}")])
        return self._found

    async def _answer(
        self, target: Target, kind: str, prompt: Sequence[int], length: int, more: Mapping[str, object]
    ) -> list[int]:
        """The prompt with its answer."""
        got = await complete(target, prompt, length, more)
        if got.num_prompt != len(prompt):
            raise BenchError(f"the server counts {got.num_prompt} tokens of a prompt of {len(prompt)} token ids")
        if got.num_cached is None:
            raise BenchError("the server does not say how many tokens it found cached (prompt_tokens_details)")
        if len(got.token_ids) != got.num_tokens:
            raise BenchError(f"the server names {len(got.token_ids)} of {got.num_tokens} tokens of an answer")
        num_known = max((_num_common(prompt, known) for known in self._known), default=0)
        times = round(1e3 * got.ttft_s, 2), round(1e3 * got.tpot_s, 2)
        number = 1 + sum(each.kind == kind for each in self._found)
        num_new = max(1, len(prompt) - num_known)
        self._found.append(Exchange(kind, number, len(prompt), num_new, got.num_cached, *times))
        self._known.append([*prompt, *got.token_ids])
        return [*prompt, *got.token_ids]

    def _message(self, name: str) -> list[int]:
        return self._text(name, self._script.input_len)

    def _text(self, name: str, length: int) -> list[int]:
        return draw(f"{self._seed}-{name}", length, *self._script.token_ids)


def of_kinds(exchanges: Sequence[Exchange]) -> dict[str, list[Exchange]]:
    """Those of each kind, in the order of KINDS."""
    return {kind: [each for each in exchanges if each.kind == kind] for kind in KINDS}


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    for count, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return count
    return min(len(left), len(right))
