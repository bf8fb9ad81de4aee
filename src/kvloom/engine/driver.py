"""Driver: makes an engine's steps, takes messages between them, and sits out the death of a rank."""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kvloom.checkpoints.fingerprint import stamp
from kvloom.contract.errors import ModelError, ServingError, Unavailable
from kvloom.contract.request import Delta, FinishReason
from kvloom.engine.adapters import Adapter
from kvloom.engine.completed import CompletedLog
from kvloom.engine.driven import Driven
from kvloom.engine.inbox import Add, Asked, Drop, Intake, Load, Message, Reset, Sleep, Unload, Wake
from kvloom.engine.link.executor import Process, RankDied
from kvloom.engine.outage import Outage

log = logging.getLogger(__name__)

_TIER_POLL_S = 0.002  # how soon an engine with nothing to compute notices what the outer KV tier has brought
_STATS_S = 0.1
_IDLE_POLL_S = 0.2  # how soon an idle engine notices that its rank died
OTHER_WEIGHTS = "the model died, and its files have changed meanwhile: an answer of the old ones cannot go on"
_NOT_READY = "the model is not ready: it is starting, restarting or stopping; try again soon"
STOPPING = "the server is stopping"
ASLEEP = "the model is asleep; POST /wake_up wakes it"
CHANGED = "its files have changed since they were loaded; POST /sleep?level=2, then /wake_up loads them as they are"
Soon = Callable[..., None]  # called with a function and its arguments
Post = Callable[[list[tuple[str, Delta | ServingError]]], None]  # called with request ids and their deltas or errors


class Driver:
    """Runs an engine's loop in `run`, the body of its thread. Other public methods may be called from any thread."""

    def __init__(self, engine: Driven, executor: Process, soon: Soon, post: Post) -> None:
        """`soon` schedules a function on the reader's loop; there `post` gets deltas and errors of requests."""
        self._engine = engine
        self._executor = executor
        self._soon, self._post_now = soon, post
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._intake = Intake()  # messages taken from the inbox and not handled yet
        self._closing = threading.Event()
        self._is_open = False  # requests are accepted
        self._outage: Outage | None = None
        self.stats = engine.stats()
        self._next_stats_s = 0.0
        self._num_restarts = 0
        self._completed = CompletedLog(executor.info.block_size)
        self._weights = stamp(engine.config.model)
        self._bedtime: list[Sleep] = []  # callers of sleep(), answered once nothing is under way
        self.is_asleep = False
        self._is_used = True  # whether KV memory may have been taken since the last release; ranks start with some

    @property
    def is_ready(self) -> bool:
        """Whether new requests run at once: the engine is open, awake, and its model is loaded."""
        return self._is_open and self._outage is None and not self.is_closing

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def check_open(self) -> None:
        """Raises Unavailable, with the reason, unless requests are accepted. While a rank restarts they are accepted
        and wait.
        """
        if not self._is_open or self.is_closing:
            raise Unavailable(ASLEEP if self.is_asleep else _NOT_READY)

    def check_ready(self) -> None:
        """Raises Unavailable, with the reason, unless is_ready."""
        self.check_open()
        if not self.is_ready:
            raise Unavailable(_NOT_READY)

    def put(self, message: Message) -> None:
        """Queue a message; the engine's thread handles it between two steps."""
        self._inbox.put(message)
        self._executor.nudge()

    def open(self) -> None:
        """Accept requests from now on."""
        self._is_open = True

    def close(self) -> None:
        """Make `run` return soon. May be called twice."""
        self._closing.set()
        self._inbox.put(None)
        self._executor.nudge()

    def run(self) -> None:
        """Run steps until `close`, then end the requests that are left."""
        while not self._closing.is_set():
            try:
                if self._outage is not None:
                    self._sit_out(self._outage)
                    continue
                self._take_inbox()
                if self._bedtime and not self._has_work:
                    self._sleep()
                    continue
                self._deliver(self._engine.start_step())
                self._engine.finish_step()
            except Exception as error:  # a rank that died, or a bug of ours
                self._interrupt(error)
            finally:
                self._note_stats()
        if self._outage is not None:
            self._outage.cancel(self._executor.kill)
        self._refuse(Unavailable(STOPPING))
        self._empty_inbox()
        for message in (*self._bedtime, *self._intake.take_all()):
            if isinstance(message, Asked):
                self._answer(message, Unavailable(STOPPING))
            elif isinstance(message, Add):
                self._post([(message.request.id, Unavailable(STOPPING))])

    @property
    def _has_work(self) -> bool:
        return bool(self._engine.has_work or self._intake)

    def _note_stats(self) -> None:
        """Publish a snapshot of the stats for other threads: at once when a request came or ended, else at most every
        0.1 s.
        """
        now_s = time.monotonic()
        if now_s >= self._next_stats_s or not self._engine.has_work:
            self.stats = replace(self._engine.stats(), total_restarts=self._num_restarts)
            self._next_stats_s = now_s + _STATS_S

    def _take_inbox(self) -> None:
        """Handle a bounded part of the messages; waits for one when there is nothing else to do. Raises RankDied."""
        idle_since_s = time.monotonic()
        while not (self._has_work or self._bedtime or self._closing.is_set()):
            try:
                self._receive(self._inbox.get(timeout=_IDLE_POLL_S))
            except queue.Empty:
                if not self._executor.is_alive():
                    raise RankDied("the model process died while idle") from None
                self._rest(time.monotonic() - idle_since_s)
        if self._engine.is_stalled and not self._intake:  # all sequences wait for the outer KV tier
            with contextlib.suppress(queue.Empty):
                self._receive(self._inbox.get(timeout=_TIER_POLL_S))
        self._empty_inbox()
        for message in self._intake.take():
            self._take(message)

    def _rest(self, idle_s: float) -> None:
        """Called after `idle_s` without a message: gives unused KV memory back to the system. Raises RankDied."""
        if self._is_used and 0 < self._engine.config.idle_release_s <= idle_s:
            self._is_used = False
            self._engine.release_free()
            self._note_stats()

    def _empty_inbox(self) -> None:
        while not self._inbox.empty():
            self._receive(self._inbox.get())

    def _receive(self, message: Message | None) -> None:
        """Queue a message from the inbox for handling; None only wakes the thread."""
        if message is not None and self._intake.put(message):
            assert isinstance(message, Drop)
            aborted = Delta(message.request_id, finish_reason=FinishReason.ABORT)
            self._post([(message.request_id, aborted)])

    def _take(self, message: Message) -> None:
        """Handle one message. Raises RankDied."""
        self._next_stats_s = 0.0
        if isinstance(message, Add) and self._outage is not None and self._outage.has_given_up:
            self._post([(message.request.id, Unavailable(_NOT_READY))])
        elif isinstance(message, Add):
            self._is_used = True
            try:
                self._engine.add(message.request)
                self._completed.added(message.request)
            except ServingError as error:
                self._deliver(self._engine.take_deltas())  # perhaps the end of an earlier request with this id
                self._post([(message.request.id, error)])
        elif isinstance(message, Drop):
            self._engine.abort(message.request_id)
        elif isinstance(message, Unload):
            adapters = self._engine.adapters
            (adapters.unload if self._outage is None else adapters.leave)(message.adapter)
        elif isinstance(message, Load):
            self._load(message)
        elif isinstance(message, Reset):
            try:
                self._engine.reset_prefix_cache(message.preempts)
            finally:  # a rank that dies here takes its cache with it, so the reset is done
                self._answer(message, None)
        elif isinstance(message, Sleep):
            self._is_open = False
            self._bedtime.append(message)
        elif isinstance(message, Wake):
            self._stay_up(message)

    def _load(self, message: Load) -> None:
        """Load an adapter and answer its caller. Raises RankDied."""
        if self._outage is not None:
            self._answer(message, Unavailable(_NOT_READY))
            return
        try:
            self._answer(message, self._engine.load_adapter(message.path))
        except ServingError as error:
            self._answer(message, error)
        except RankDied:
            self._answer(message, Unavailable("the model process died while it loaded the adapter"))
            raise

    def _answer(self, message: Asked, result: Any) -> None:
        """Answer the caller of a message on its loop; `result` is the value asked for, or a ServingError."""
        answer: asyncio.Future[Any] = message.answer

        def settle() -> None:
            if answer.cancelled():
                if isinstance(result, Adapter):  # the caller is gone, and so the only one who knew the adapter's id
                    self.put(Unload(result.id))
            elif isinstance(result, ServingError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

        self._soon(settle)

    # -- sleep

    def _stay_up(self, message: Wake) -> None:
        """Refuse pending calls of sleep(), because the model was just woken."""
        asked, self._bedtime = self._bedtime, []
        for sleep in asked:
            self._answer(sleep, Unavailable("the model was woken before it slept"))
        self._is_open = self._outage is None or not self._outage.has_given_up
        self._answer(message, None)

    def _sleep(self) -> None:
        """End the ranks and handle messages until a caller wakes the model or the server stops."""
        self._executor.close()
        self._engine.reset()
        self.is_asleep = True
        self._next_stats_s = 0.0
        self._note_stats()
        log.warning("the model is asleep")
        asked, self._bedtime = self._bedtime, []
        for sleep in asked:
            self._answer(sleep, None)
        while self.is_asleep and not self._closing.is_set():
            self._take_asleep(self._inbox.get())

    def _take_asleep(self, message: Message | None) -> None:
        if isinstance(message, Add):
            self._post([(message.request.id, Unavailable(ASLEEP))])
        elif isinstance(message, Unload):
            self._engine.adapters.leave(message.adapter)
        elif isinstance(message, Load):
            self._answer(message, Unavailable(ASLEEP))
        elif isinstance(message, Wake):
            self._wake(message)
        elif isinstance(message, Reset | Sleep):  # nothing is cached while the model sleeps
            self._answer(message, None)

    def _wake(self, message: Wake) -> None:
        try:
            if message.wants_same_weights and stamp(self._engine.config.model) != self._weights:
                raise ModelError(CHANGED)
            self._load_ranks()
            self._engine.resume(self._engine.adapters.reload())
        except Exception as error:  # whatever went wrong: the caller is told, and the model stays asleep
            log.error("waking the model failed", exc_info=not isinstance(error, ModelError | RankDied))
            self._executor.close()
            self._answer(message, ModelError(f"waking the model failed, it sleeps on: {error}"))
            return
        self.is_asleep = False
        self._is_open = True
        log.warning("the model is awake")
        self._answer(message, None)

    # -- a rank that dies

    def _interrupt(self, error: Exception) -> None:
        """A step failed: requests wait for a new rank if the rank died; any other exception ends them."""
        if self.is_closing and isinstance(error, RankDied):
            return
        why = str(error)
        try:
            if not isinstance(error, RankDied):
                raise error
            self._deliver(self._engine.suspend())
        except Exception:  # a bug of ours: requests that wait must still be ended
            log.exception("the engine failed on a step")
            why = "the engine failed on a step; the server's log says how"
            self._deliver(self._engine.fail_all(why))
            self._engine.reset()
        if self._bedtime and not self._has_work:  # the model is asked to sleep, so the ranks are not restarted
            return
        if self._outage is None:
            log.error("%s; %d requests wait until it is back", why, self._engine.stats().num_waiting)
            self._outage = Outage(why, self._weights, self._engine.config.crash_patience_s)
        self._outage.load(self._load_ranks, lambda: self._inbox.put(None))

    def _sit_out(self, outage: Outage) -> None:
        """Wait for the ranks to restart; meanwhile messages are handled and new requests wait. Raises RankDied."""
        if not self._intake:
            with contextlib.suppress(queue.Empty):
                self._receive(self._inbox.get(timeout=outage.left_s))
        self._empty_inbox()
        for message in self._intake.take():
            self._take(message)
        self._deliver(self._engine.take_deltas())
        if outage.is_loaded:
            self._resume(outage)
        elif self._bedtime and not self._has_work:
            outage.cancel(self._executor.kill)
            self._outage = None
        elif outage.left_s == 0:
            self._give_up(outage)

    def _resume(self, outage: Outage) -> None:
        """Continue on the restarted ranks. Raises RankDied."""
        if outage.weights != self._weights:
            self._deliver(self._engine.fail_all(OTHER_WEIGHTS))  # at once: the rank may die below
            outage.weights = self._weights
        lost = self._engine.adapters.reload()
        self._deliver(self._engine.resume(lost))
        self._num_restarts += 1
        num_waiting = self._engine.stats().num_waiting
        log.warning(
            "the model is ready again after %.1f s (%s): %d requests go on", outage.passed_s, outage.why, num_waiting
        )
        self._outage = None
        self._is_open = not self._bedtime

    def _give_up(self, outage: Outage) -> None:
        """The ranks did not come back in time: end the waiting requests and refuse new ones until they do."""
        outage.has_given_up, self._is_open = True, False
        refused = Unavailable(f"the model died and has not come back within {outage.passed_s:.0f} s; try again later")
        log.error("%s: %d requests end", refused, self._refuse(refused))

    def _refuse(self, error: Unavailable) -> int:
        """End every request with `error`. Returns how many there were."""
        last = self._engine.fail_all(str(error))
        self._completed.delivered(last, self._engine.last_step)
        self._post([(delta.request_id, error if delta.error else delta) for delta in last])
        return len(last)

    def _load_ranks(self) -> None:
        """Load the model as at the first start. Raises ModelError, RankDied."""
        model = self._engine.config.model
        weights = stamp(model)
        self._executor.restart()
        if stamp(model) != weights:
            raise ModelError(f"{model}: its files have changed while the model was loaded; load it again")
        self._weights = weights
        self._is_used = True

    def _deliver(self, deltas: list[Delta]) -> None:
        self._completed.delivered(deltas, self._engine.last_step)
        if any(delta.finish_reason for delta in deltas):
            self._next_stats_s = 0.0
        self._post([(delta.request_id, delta) for delta in deltas])

    def _post(self, items: list[tuple[str, Delta | ServingError]]) -> None:
        if items:
            self._soon(self._post_now, items)
