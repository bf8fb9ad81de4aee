"""Memory: the budget, which models fit, which are evicted, and the pressure ladder. Pure: readings are arguments."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvloom.gewu.qos import Level

MIN_RESERVE_BYTES = 256 << 20
MIN_KV_TOKENS = 256
LEAVE_AFTER_S = 10.0  # seconds below a level before it is left
PSI_WINDOW_S = 2.0
_BYTES_PER_TOKEN = 4  # bytes a token of a prompt that is not tokenised yet: English text
SOME_STALL_US, FULL_STALL_US = 150_000, 100_000  # within the window


@dataclass(frozen=True, slots=True)
class Readings:
    """Figures of the system, in bytes and microseconds. None: unlimited or unknown."""

    available_bytes: int
    total_bytes: int
    limit_bytes: int | None = None  # limit of the control group
    used_bytes: int = 0  # bytes used by the control group
    some_stall_us: int | None = None  # PSI counters, monotonic
    full_stall_us: int | None = None


def budget_bytes(readings: Readings, configured_bytes: int | None, held_bytes: int) -> int:
    """Bytes that all models together may take, `held_bytes` (already taken) included."""
    reserve = max(readings.total_bytes // 10, MIN_RESERVE_BYTES)
    free = readings.available_bytes - reserve
    if readings.limit_bytes is not None:
        free = min(free, readings.limit_bytes - readings.used_bytes)
    budget = max(0, free) + held_bytes
    return budget if configured_bytes is None else min(budget, configured_bytes)


@dataclass(frozen=True, slots=True)
class Holder:
    """A model that takes memory, or is about to."""

    key: str
    bytes: int
    level: Level | None  # the highest class of its unfinished requests; None = idle
    last_used_s: float


def _reclaim_order(holder: Holder) -> tuple[int, float]:
    """Sort key of eviction: idle models first, then low classes; within these the least recently used."""
    return (-1 if holder.level is None else int(holder.level), holder.last_used_s)


def plan_admission(need_bytes: int, budget: int, holders: Sequence[Holder], level: Level) -> list[str] | None:
    """The models to evict so that `need_bytes` fit, [] when none must go, None when it cannot be done.

    Idle models and those of a class below `level` may go, never one that serves USER_INTERACTIVE.
    """
    free = budget - sum(holder.bytes for holder in holders)
    victims: list[str] = []
    for holder in sorted(holders, key=_reclaim_order):
        if free >= need_bytes:
            break
        if holder.level is None or (holder.level < level and holder.level < Level.USER_INTERACTIVE):
            victims.append(holder.key)
            free += holder.bytes
    return victims if free >= need_bytes else None


def kv_tokens(bytes_per_token: int, free_bytes: int, wanted_tokens: int) -> int:
    """Tokens of KV cache to give a model: as many as wanted, or as fit."""
    return min(wanted_tokens, free_bytes // max(1, bytes_per_token))


def kv_need(num_prompt_bytes: int, max_tokens: int | None, max_seq_len: int | None) -> int:
    """KV cache tokens that a request may need, in a context of `max_seq_len` (None = unknown).

    An answer without a limit counts as MIN_KV_TOKENS. A prompt too long for the context ends with "length", so it needs
    no more than the whole context.
    """
    need = num_prompt_bytes // _BYTES_PER_TOKEN + (MIN_KV_TOKENS if max_tokens is None else max_tokens)
    return need if max_seq_len is None else min(need, max_seq_len)


@dataclass(slots=True)
class Ladder:
    """The pressure level: 0 none, 1 unload idle models, 2 pause low classes. Rises at once, falls after 10 s below."""

    level: int = 0
    _below_since_s: float | None = None
    # time of a reading, and its some and full counters
    _history: list[tuple[float, int, int]] = field(default_factory=list)

    def update(self, readings: Readings, now_s: float, fired: int = 0) -> int:
        """`fired`: level whose kernel trigger fired just now, 0 = none."""
        seen = max(fired, self._seen(readings, now_s))
        if seen >= self.level:
            self.level = seen
            self._below_since_s = None
        elif self._below_since_s is None:
            self._below_since_s = now_s
        elif now_s - self._below_since_s >= LEAVE_AFTER_S:
            self.level -= 1
            self._below_since_s = now_s
        return self.level

    def _seen(self, readings: Readings, now_s: float) -> int:
        """The level of this reading by itself."""
        some, full = readings.some_stall_us or 0, readings.full_stall_us or 0
        self._history.append((now_s, some, full))
        while len(self._history) > 1 and self._history[1][0] <= now_s - PSI_WINDOW_S:
            self._history.pop(0)
        _, some_then, full_then = self._history[0]
        if full - full_then >= FULL_STALL_US or readings.available_bytes < readings.total_bytes // 20:
            return 2
        if some - some_then >= SOME_STALL_US or readings.available_bytes < readings.total_bytes // 10:
            return 1
        return 0


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_bytes(text: str) -> int:
    """ "512M", "2G", "1073741824". Raises ValueError."""
    number = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = number[-1:] if number[-1:] in _UNITS else ""
    try:
        size = int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (ValueError, OverflowError):
        size = -1
    if size < 1:
        raise ValueError(f"must be bytes, 1 at least, or like 512M or 2G, got {text!r}")
    return size
