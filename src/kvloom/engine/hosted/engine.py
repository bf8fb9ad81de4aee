"""HostedEngine: an engine whose requests are scheduled and computed in another process, a Host.

Text, stop strings and finish reasons are made here, as for kvloom's own engine, so all dialects behave alike. A step is
what the host reports at once. When a host dies, requests wait for the next one and continue there (resumable.py).
"""

import dataclasses
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from kvloom.contract.capabilities import check_capable
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.contract.hosted import Abort, Answers, Brought, Figures, HostReport, Start
from kvloom.contract.messages import Logprob, PromptLogprobs, Sample
from kvloom.contract.request import Delta, FinishReason, Request, check_request
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.adapters import Adapter, Adapters
from kvloom.engine.completed import StepSize
from kvloom.engine.counts import Counts
from kvloom.engine.hosted.host import Host
from kvloom.engine.hosted.resumable import OTHERWISE, behind, follows
from kvloom.engine.live import Arrivals, Live
from kvloom.engine.schedule.repute import Repute
from kvloom.engine.stats import Stats
from kvloom.engine.text.stop import Ends

GUILTY = "the model's process died twice while it computed this request"
_FINISHES = {"stop": FinishReason.EOS, "length": FinishReason.LENGTH}


@dataclass(slots=True, eq=False)
class _Hosted:
    """A request, and what its host has done of it."""

    live: Live
    is_started: bool = False  # it was sent to the host
    replay: deque[int] = field(default_factory=deque)  # delivered tokens that the host generates again
    num_heard: int = 0  # answer tokens that all hosts together have generated for it
    repute: Repute = field(default_factory=Repute)

    @property
    def answer(self) -> list[int]:
        return self.live.seq.token_ids[self.live.seq.num_prompt :]

    @property
    def is_suspect(self) -> bool:
        return self.repute.is_suspect(self.num_heard)


class HostedEngine:
    """Implements Driven; call it from one thread. Every added request gets exactly one delta with a finish_reason."""

    def __init__(self, config: EngineConfig, host: Host, vocabulary: Tokenizer) -> None:
        self.config = config
        self._host, self._vocabulary = host, vocabulary
        self.adapters = Adapters(host, lambda: (hosted.live.request.adapter for hosted in self._hosted.values()))
        self._hosted: dict[int, _Hosted] = {}  # by sequence id, in order of arrival
        self._ids: dict[str, int] = {}  # request id -> sequence id
        self._outbox: list[Delta] = []
        self._counts = Counts()
        self._arrivals = Arrivals(config, vocabulary)
        self._before = Figures()  # totals of the hosts before this one
        self._figures = Figures()
        self._metrics = ""
        self.reset()

    def reset(self) -> None:
        """The host was replaced or is gone: the next one knows of no request."""
        info = self._host.info
        self.max_seq_len = min(info.max_seq_len, self.config.max_seq_len or info.max_seq_len)
        self._ends = Ends(self._vocabulary.eos_ids, self.max_seq_len)
        self.last_step = StepSize()
        self._before.total_steps += self._figures.total_steps
        self._before.total_preemptions += self._figures.total_preemptions
        self._figures = Figures()
        for hosted in self._hosted.values():
            hosted.is_started = False
            hosted.replay.clear()

    @property
    def has_work(self) -> bool:
        """Whether a request waits for tokens."""
        return bool(self._hosted or self._outbox)

    @property
    def is_stalled(self) -> bool:
        """Always False: a host that has requests is always working."""
        return False

    def add(self, request: Request) -> None:
        """Accept a request. Raises BadRequest when it can never run, NotFound when its adapter is gone."""
        info = self._host.info
        check_request(request, self.max_seq_len, info.vocab_size)
        check_capable(info.lacks, request, request.adapter)
        if request.id in self._ids:
            raise BadRequest("request_id", f"{request.id!r} is in use by a running request")
        if request.pooling and request.pooling != info.pooling:
            raise BadRequest("pooling", f"must be {info.pooling!r} with this engine, got {request.pooling!r}")
        self.adapters.digest(request.adapter)
        live = self._arrivals.live(request, self.max_seq_len)
        request, seq = live.request, live.seq
        if not request.is_look:  # the request that the look is for is counted instead
            self._counts.add("total_requests")
            self._counts.add("total_prompt_tokens", seq.num_prompt)
        if request.computes_nothing:
            self._counts.add("total_finished")
            self._outbox.append(live.delta(FinishReason.LENGTH))
            return
        if not self._hosted:
            self._host.expect_from_now()
        self._hosted[seq.id] = _Hosted(live)
        self._ids[request.id] = seq.id

    def abort(self, request_id: str) -> None:
        """End a request now. Unknown and finished ids are ignored. Raises RankDied."""
        hosted = self._hosted.get(self._ids.get(request_id, -1))
        if hosted is not None:
            self._outbox.append(hosted.live.delta(FinishReason.ABORT, text=hosted.live.stops.finish()))
            self._retire(hosted, is_known=hosted.is_started)

    def fail_all(self, error: str) -> list[Delta]:
        """End every request with an error. Returns the last deltas."""
        deltas, self._outbox = self._outbox, []
        for hosted in self._hosted.values():
            deltas.append(replace(hosted.live.delta(FinishReason.ERROR), error=error))
        self._counts.add("total_finished", len(self._hosted))
        self._hosted.clear()
        self._ids.clear()
        return deltas

    def suspend(self) -> list[Delta]:
        """The host died. Its requests are suspects; those that were suspects before end. Returns the deltas that had
        arrived.
        """
        for hosted in [hosted for hosted in self._hosted.values() if hosted.is_started]:
            if hosted.repute.accuse(hosted.num_heard):
                self._fail(hosted, GUILTY, is_known=False)
                self._counts.add("total_guilty")
            else:
                self._counts.add("total_resumed")
                num_lost = len(hosted.live.seq.token_ids)
                self._counts.add("total_recomputed_tokens", num_lost)
        self._counts.add("total_crashes")
        self.reset()
        return self.take_deltas()

    def resume(self, lost: Mapping[int, str]) -> list[Delta]:
        """A new host is loaded. Returns the last deltas of requests that cannot continue; `lost` gives the reason by
        adapter id.
        """
        self.reset()
        for hosted in list(self._hosted.values()):
            live = hosted.live
            error = lost.get(live.request.adapter)
            if error is None and live.seq.max_len > self.max_seq_len:
                error = f"the model came back with room for {self.max_seq_len} tokens, too few for this request"
            if error is not None:
                self._fail(hosted, error, is_known=False)
        self._host.expect_from_now()
        return self.take_deltas()

    def start_step(self) -> list[Delta]:
        """Send the host the requests that have arrived. Returns the deltas of the last step. Raises RankDied."""
        for hosted in self._startable():
            order = self._order(hosted)
            hosted.is_started = True
            self._host.send(order)
        self.adapters.sweep()
        return self.take_deltas()

    def finish_step(self) -> None:
        """Wait until the host reports something or `nudge` is called. Raises RankDied."""
        if self._hosted:
            for report in self._host.collect():
                self._take(report)

    def take_deltas(self) -> list[Delta]:
        deltas, self._outbox = self._outbox, []
        return deltas

    def reset_prefix_cache(self, preempts: bool = False) -> None:
        """Raises RankDied."""
        self._host.reset_cache(preempts)

    def release_free(self) -> None:
        """Nothing to release here, the memory is the host's. Takes in figures that it reported while idle."""
        for report in self._host.heard():
            self._take(report)

    def load_adapter(self, path: str) -> Adapter:
        """A LoRA adapter from a folder. Raises BadRequest, RankDied."""
        return self.adapters.load(path)

    def stats(self) -> Stats:
        """Gauges, slightly older where the host reports them, and totals since the engine was made."""
        info, figures = self._host.info, self._figures
        num_started = sum(hosted.is_started for hosted in self._hosted.values())
        num_running = min(figures.num_running, num_started)
        num_held = round(info.num_blocks * figures.kv_usage) if self._hosted else 0
        self._counts.totals["total_steps"] = self._before.total_steps + figures.total_steps
        self._counts.totals["total_preemptions"] = self._before.total_preemptions + figures.total_preemptions
        gauges = {
            "num_running": num_running,
            "num_waiting": len(self._hosted) - num_running,
            "num_blocks": info.num_blocks,
            "num_free_blocks": info.num_blocks - num_held,
            "max_batch": self.config.max_batch,
        }
        return dataclasses.replace(self._counts.stats(gauges, {}), engine_metrics=self._metrics)

    # -- to the host

    def _startable(self) -> list[_Hosted]:
        """The requests to send to the host now: all of them; but suspects first, one at a time, each alone."""
        suspects = [hosted for hosted in self._hosted.values() if hosted.is_suspect]
        if not suspects:
            return [hosted for hosted in self._hosted.values() if not hosted.is_started]
        return [] if any(hosted.is_started for hosted in suspects) else suspects[:1]

    def _order(self, hosted: _Hosted) -> Start:
        live = hosted.live
        seq, request, params = live.seq, live.request, live.request.params
        prompt, answer = seq.token_ids[: seq.num_prompt], hosted.answer
        if answer and follows(params):
            prompt, params = seq.token_ids, behind(params, len(answer))
        else:
            hosted.replay = deque(answer)
        return Start(
            seq.id, list(prompt), params, live.seed, seq.max_len - len(prompt), request.priority, request.cache_salt,
            request.adapter, request.pooling, request.sight, request.is_look,
        )  # fmt: skip

    # -- from the host

    def _take(self, report: HostReport) -> None:
        if isinstance(report, Figures):
            self._metrics = self._metrics if report.metrics is None else report.metrics
            self._figures = report
        elif isinstance(report, Answers):
            for item in report.items:
                if (hosted := self._hosted.get(item.id)) is not None:
                    self._take_item(hosted, item)
            self.last_step = StepSize(len(report.items), round(self._host.info.num_blocks * self._figures.kv_usage))

    def _take_item(self, hosted: _Hosted, item: Brought) -> None:
        live = hosted.live
        if item.error:
            error = f"{item.field}: {item.error}" if item.field else item.error
            self._fail(hosted, error, is_known=False, is_callers=bool(item.field))
            return
        if item.num_cached and not hosted.num_heard:
            live.seq.num_cached = item.num_cached
            self._counts.add("total_cached_tokens", item.num_cached)
        if item.prompt_logprobs:
            first = max(1, live.request.params.scored_from)
            live.take_prompt_logprobs(PromptLogprobs(live.seq.id, first - 1, item.prompt_logprobs))
        if item.prompt_ids:
            seen = replace(live.delta(FinishReason.LENGTH), prompt_ids=tuple(item.prompt_ids))
            self._end(hosted, seen, is_known=False)
            return
        if item.embedding:
            live.embedding = item.embedding
            self._end(hosted, live.delta(FinishReason.LENGTH), is_known=False)
            return
        for number, token_id in enumerate(item.token_ids):
            logprob = item.logprobs[number] if item.logprobs else None
            if not self._take_token(hosted, token_id, logprob, is_known=not item.finish):
                return
        if item.finish:
            text = live.stops.finish()
            self._end(hosted, live.delta(_FINISHES.get(item.finish, FinishReason.LENGTH), text=text), is_known=False)

    def _take_token(self, hosted: _Hosted, token_id: int, logprob: Logprob | None, is_known: bool) -> bool:
        """Append a token. Returns whether the answer continues."""
        live = hosted.live
        hosted.num_heard += 1
        if hosted.replay:
            if token_id == hosted.replay.popleft():
                return True
            self._fail(hosted, OTHERWISE, is_known)
            return False
        (fresh,) = live.take([Sample(live.seq.id, token_id, logprob)], self._ends)
        if fresh.token is not None:
            live.seq.token_ids.append(token_id)
            self._counts.add("total_output_tokens")
        delta = live.tell(fresh)
        if delta.finish_reason is None:
            self._outbox.append(delta)
            return True
        self._end(hosted, delta, is_known)
        return False

    def _end(self, hosted: _Hosted, delta: Delta, is_known: bool) -> None:
        self._outbox.append(delta)
        self._retire(hosted, is_known)

    def _fail(self, hosted: _Hosted, error: str, is_known: bool, is_callers: bool = False) -> None:
        delta = replace(hosted.live.delta(FinishReason.ERROR), error=error, is_callers=is_callers)
        self._end(hosted, delta, is_known)

    def _retire(self, hosted: _Hosted, is_known: bool) -> None:
        """Forget the request; `is_known`: the host still computes it, and is told. Raises RankDied."""
        del self._hosted[hosted.live.seq.id]
        del self._ids[hosted.live.request.id]
        self._counts.add("total_finished", not hosted.live.request.is_look)
        if is_known:
            self._host.send(Abort(hosted.live.seq.id))
