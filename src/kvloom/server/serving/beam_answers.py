"""Beam search over the engine: each step requests one token for every beam, whose prompt is in the prefix cache."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from kvloom.contract.request import Delta, FinishReason, Request
from kvloom.contract.sampling import MAX_LOGPROBS, SamplingParams
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.feed import Step
from kvloom.engine.text.detok import Detokenizer, text_bytes
from kvloom.engine.text.stop import StopStrings
from kvloom.server.serving.beams import Beams, BeamSearch, End, Hypothesis
from kvloom.server.serving.engine import EngineLike
from kvloom.server.serving.running import Running, aborted

MAX_WIDTH = MAX_LOGPROBS // 2  # a step asks for the 2 * width most likely tokens of each beam
Steps = Callable[[list[Request]], Awaitable[list[Delta]]]


class BeamAnswers:
    """`context`: tokens of prompt and answer together."""

    def __init__(self, beams: Beams, tokenizer: Tokenizer, context: int) -> None:
        self._beams, self._tokenizer, self._context = beams, tokenizer, context

    async def best(self, request: Request, count: int, steps: Steps) -> list[Delta]:
        """The `count` best answers, best first, each in one delta. `steps` runs requests for one token. Raises
        ServingError.
        """
        params, num_prompt = request.params, len(request.prompt_ids)
        left = self._context - num_prompt
        max_tokens = left if params.max_tokens is None else min(left, params.max_tokens)
        search = BeamSearch(self._beams, num_prompt, max_tokens, lambda ids: self._end_of(ids, params))
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=2 * self._beams.width)
        cut, num_cached, num_steps = FinishReason.LENGTH, 0, 0
        while not search.is_over:
            asked = [
                replace(
                    request,
                    id=f"{request.id}-{num_steps}-{i}",
                    prompt_ids=(*request.prompt_ids, *beam.token_ids),
                    params=one,
                )
                for i, beam in enumerate(search.live)
            ]
            found = await steps(asked)
            if not all(delta.logprobs for delta in found):
                cut = FinishReason.ABORT
                break
            num_cached = num_cached if num_steps else found[0].num_cached_tokens
            search.take([delta.logprobs[0] for delta in found])
            num_steps += 1
        best = search.best(count, cut)
        best += [Hypothesis(end=(cut, None))] * (count - len(best))  # a search that is stopped at once has one beam
        return [self._delta(request, one, num_cached) for one in best]

    def _end_of(self, ids: tuple[int, ...], params: SamplingParams) -> End | None:
        if ids[-1] in params.stop_token_ids:
            return FinishReason.STOP, ids[-1]
        if ids[-1] in self._tokenizer.eos_ids and not params.ignore_eos:
            return FinishReason.EOS, None
        stop = self._read(ids, params)[1].matched if params.stop else None
        return None if stop is None else (FinishReason.STOP, stop)

    def _delta(self, request: Request, found: Hypothesis, num_cached: int) -> Delta:
        assert found.end is not None, "an answer of a search has an end"
        reason, stop = found.end
        ids, params = found.token_ids, request.params
        is_mark = (reason is FinishReason.EOS or isinstance(stop, int)) and not params.include_stop
        text, stops = self._read(ids[:-1] if is_mark else ids, params)
        text += stops.finish()
        logprobs = () if params.logprobs is None else found.logprobs
        return Delta(request.id, text, ids, logprobs, None, reason, stop, num_cached)

    def _read(self, ids: tuple[int, ...], params: SamplingParams) -> tuple[str, StopStrings]:
        """The text as that of any answer, up to a stop string; what the stop strings hold back is not in it."""
        characters = Detokenizer(text_bytes(self._tokenizer, params.skip_special_tokens))
        stops, text = StopStrings(params.stop, params.include_stop), ""
        for token_id in ids:
            text += stops.add(characters.add(token_id))
            if stops.matched is not None:
                break
        return text, stops


class BeamFeed:
    """Looks like a Feed of the engine: returns the best answers, all those of a prompt at once, prompt by prompt."""

    def __init__(self, answers: BeamAnswers, running: Running, engine: EngineLike) -> None:
        """`running.requests` are those under way; at first they are the requests to be answered."""
        self._answers, self._running, self._engine = answers, running, engine
        self._asked, self._count, self._index = running.requests, running.generation.n, 0

    def __enter__(self) -> "BeamFeed":
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing: requests are cancelled where they are awaited."""

    @property
    def times_s(self) -> list[float]:
        """When the answers of the last step read came: now."""
        return [time.perf_counter()] * self._count

    def gather(self, num_deltas: int) -> None:
        """Does nothing: every answer comes whole."""

    def tell_silence(self, every_s: float) -> None:
        """Does nothing: no delta comes before a whole answer, so no stream has begun."""

    async def get(self) -> Step | None:
        """The next prompt's answers; None after the last. Raises ServingError."""
        first = self._index
        if first == len(self._asked):
            return None
        self._index += self._count
        found = await self._answers.best(self._asked[first], self._count, self._one_token)
        return list(enumerate(found, first))

    async def _one_token(self, requests: list[Request]) -> list[Delta]:
        """The token of each request; without logprobs where it was stopped."""
        self._running.requests, found = requests, [aborted(request) for request in requests]
        if not self._running.ticket.is_stopped:
            with self._engine.open(requests) as feed:
                while (step := await feed.get()) is not None:
                    for index, delta in step:
                        found[index] = delta if delta.logprobs else found[index]
        return found
