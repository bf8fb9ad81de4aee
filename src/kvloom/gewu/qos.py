"""QoS levels, and the planner that serves the highest class first but starves no class.

Pure: time comes in through `clock`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum

from kvloom.contract.config import Limits
from kvloom.engine.schedule.blocks import BlockPool
from kvloom.engine.schedule.commit import release_seq
from kvloom.engine.schedule.scheduler import plan_step
from kvloom.engine.schedule.seq import Plan, Seq, Status

STARVED_AFTER_S = 10.0  # seconds without a step after which a paused sequence is granted one
STARVED_EARLY_S = 9.5  # the same while the highest class is not prefilling, so that it delays no first token
LOW_STEP_S = 0.15  # seconds that a prefill chunk below USER_INITIATED should take at most: others wait for its end
MIN_CHUNK = 16  # tokens; smaller chunks would spend most time on reading weights
RISE_EVERY_S = 30.0  # seconds of being paused that raise a request by one class


class Level(IntEnum):
    """QoS_Level of the ABI."""

    BACKGROUND = 0
    UTILITY = 1
    DEFAULT = 2
    USER_INITIATED = 3
    DEADLINE_REQUEST = 4
    USER_INTERACTIVE = 5


NICE = {  # nice value of compute threads while this class is served (the platform's foreground table)
    Level.BACKGROUND: 10,
    Level.UTILITY: 5,
    Level.DEFAULT: 0,
    Level.USER_INITIATED: 0,
    Level.DEADLINE_REQUEST: 0,
    Level.USER_INTERACTIVE: 0,
}


def effective_level(of_session: Level | None, of_thread: int) -> Level:
    """The level of a request. `of_thread` is encoded as in frames: level + 1, 0 = not set."""
    if of_session is not None:
        return of_session
    return Level(of_thread - 1) if 1 <= of_thread <= len(Level) else Level.DEFAULT


def risen(level: Level, paused_s: float) -> Level:
    """The class after being paused for `paused_s`: rises up to USER_INITIATED, never falls."""
    if level >= Level.USER_INITIATED:
        return level
    return Level(min(level + int(paused_s // RISE_EVERY_S), Level.USER_INITIATED))


class ClassPlanner:
    """A planner for `Engine`: plan_step over the sequences of the highest class, plus those that would starve.

    `floor` is the class that is served elsewhere on this device: lower ones wait, but do not starve. Below `hard_floor`
    nothing runs at all (power, memory). A paused sequence keeps its blocks until a higher class needs them. A
    sequence's level is its `priority`.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        on_serve: Callable[[Level], None] = lambda level: None,
        on_trim: Callable[[list[int], list[int]], object] = lambda blocks, windows: None,
    ) -> None:
        """`on_serve` gets the class of each plan before it is carried out; `on_trim` the free blocks, and those of a
        window, when `is_trimming` was set.
        """
        self.floor = Level.BACKGROUND
        self.hard_floor = Level.BACKGROUND
        self.is_dropping = False  # paused sequences below hard_floor release their blocks at the next step
        self.is_trimming = False  # cached prefixes that no sequence holds are forgotten at the next step
        self.has_steps = False  # whether the last plan had steps
        self._clock = clock
        self._on_serve = on_serve
        self._on_trim = on_trim
        self._last_step_s: dict[int, float] = {}
        self._paused_since_s: dict[int, float] = {}
        self._chunk = _ChunkSize()
        self._seqs: Sequence[Seq] = ()  # of the last plan
        self._block_size = 0

    def __call__(self, seqs: Sequence[Seq], pool: BlockPool, limits: Limits) -> Plan:
        """What the next step computes. Unlike plan_step it preempts paused sequences in place."""
        now_s = self._clock()
        self._chunk.step_ended(now_s)
        self._forget(seqs)
        self._seqs, self._block_size = seqs, limits.block_size
        chosen = self._choose(seqs, now_s)
        picked = {seq.id for seq in chosen}
        paused = [seq for seq in seqs if seq.id not in picked]
        self._make_room(chosen, paused, pool, limits)
        if self.is_trimming:
            self.is_trimming = False
            self._on_trim(pool.drop_cached(), pool.windows.drop_cached() if pool.windows else [])
        if chosen and all(seq.priority < Level.USER_INITIATED for seq in chosen):
            limits = replace(limits, max_prefill_tokens=self._chunk.num_tokens(limits.prefill_tokens))
        plan = plan_step(chosen, pool, limits)
        for step in plan.steps:
            self._last_step_s[step.seq.id] = now_s
        self.has_steps = bool(plan.steps)
        if plan.steps:
            self._chunk.step_begins(now_s, sum(step.num_tokens for step in plan.steps))
            self._on_serve(max(Level(step.seq.priority) for step in plan.steps))
        return plan

    def held_tokens(self) -> dict[str, int]:
        """KV cache tokens that the sequences of the last plan hold, by salt."""
        held: dict[str, int] = {}
        for seq in self._seqs:
            if seq.block_table:
                held[seq.salt] = held.get(seq.salt, 0) + len(seq.block_table) * self._block_size
        return held

    def wait_s(self) -> float:
        """After an empty plan: seconds until a sequence would starve, at most 1."""
        now_s = self._clock()
        waits = (last + STARVED_AFTER_S - now_s for last in self._last_step_s.values())
        return min(1.0, max(0.01, min(waits, default=1.0)))

    def _choose(self, seqs: Sequence[Seq], now_s: float) -> list[Seq]:
        allowed = [seq for seq in seqs if seq.priority >= self.hard_floor]
        classes = {
            seq.id: risen(Level(seq.priority), now_s - self._paused_since_s.get(seq.id, now_s)) for seq in allowed
        }
        top = max(classes.values(), default=Level.BACKGROUND)
        is_prefilling = any(classes[seq.id] == top and seq.num_pending > 1 for seq in allowed)
        patience_s = STARVED_AFTER_S if is_prefilling else STARVED_EARLY_S
        chosen = []
        for seq in allowed:
            last_s = self._last_step_s.setdefault(seq.id, now_s)
            if classes[seq.id] == top and top >= self.floor:
                if classes[seq.id] == seq.priority:
                    self._paused_since_s.pop(seq.id, None)
                chosen.append(seq)
            else:
                self._paused_since_s.setdefault(seq.id, now_s)
                if now_s - last_s >= patience_s:
                    chosen.append(seq)
        return sorted(chosen, key=lambda seq: -classes[seq.id])  # stable: arrival order within a class

    def _make_room(self, chosen: Sequence[Seq], paused: Sequence[Seq], pool: BlockPool, limits: Limits) -> None:
        """Preempt paused sequences, lowest class and youngest first, until the chosen ones are sure to find their
        blocks.
        """
        victims = sorted((seq for seq in paused if seq.block_table), key=lambda seq: (-seq.priority, seq.id))
        if self.is_dropping:
            self.is_dropping = False
            for victim in [seq for seq in victims if seq.priority < self.hard_floor]:
                victims.remove(victim)
                _preempt(victim, pool)
        waiting = next((seq for seq in chosen if seq.status is Status.WAITING), None)
        tokens = (limits.max_tokens if chosen else 0) + (len(waiting.token_ids) if waiting else 0)
        need = len(chosen) + -(-tokens // limits.block_size)
        windows = pool.windows
        least = min(need, windows.most_needed + len(chosen)) if windows else 0  # a long prompt makes do with these
        while victims and (pool.num_free < need or (windows is not None and windows.num_free < least)):
            _preempt(victims.pop(), pool)

    def _forget(self, seqs: Sequence[Seq]) -> None:
        live = {seq.id for seq in seqs}
        for times in (self._last_step_s, self._paused_since_s):
            for gone in [id for id in times if id not in live]:
                del times[gone]


class _ChunkSize:
    """How many prompt tokens fit into a step of LOW_STEP_S, by the measured time of steps on this device."""

    def __init__(self) -> None:
        self._token_s: float | None = None  # seconds a token of the last chunk
        self._begun: tuple[float, int] | None = None  # start of the running step, and its tokens

    def step_begins(self, now_s: float, num_tokens: int) -> None:
        self._begun = (now_s, num_tokens)

    def step_ended(self, now_s: float) -> None:
        """A step has ended, so the next plan is due. Steps that only decode say nothing about chunks."""
        if self._begun is not None:
            began_s, num_tokens = self._begun
            if num_tokens >= MIN_CHUNK:
                self._token_s = (now_s - began_s) / num_tokens
            self._begun = None

    def num_tokens(self, most: int) -> int:
        """Tokens of the next chunk: MIN_CHUNK to `most`."""
        if not self._token_s:
            return most
        return max(min(MIN_CHUNK, most), min(most, int(LOW_STEP_S / self._token_s)))


def _preempt(seq: Seq, pool: BlockPool) -> None:
    release_seq(seq, pool, Status.WAITING)
    seq.num_preemptions += 1
