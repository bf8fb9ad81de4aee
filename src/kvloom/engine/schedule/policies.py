"""Policies: sort keys for plan_step that decide which sequence comes first. Pure.

The effect of every key is bounded, so that in the end arrival order decides and no sequence starves. Waiting sequences
overtake each other by their turn, and by their level under MLFQ, and no further.
"""

from kvloom.contract.errors import BadRequest
from kvloom.engine.schedule.scheduler import Policy
from kvloom.engine.schedule.seq import Seq

MAX_DEMOTIONS = 4  # preemptions after which a sequence counts like one that never was preempted
QUANTUM = 64  # tokens a sequence may answer on the first level of MLFQ; each level doubles it
MAX_LEVEL = 5
LEVEL_STEP_S = 1.0  # seconds of waiting that one level is worth
MAX_PRIORITY = 5  # 1 is the most urgent, 0 = none given, which counts as the middle
PRIORITY_STEP_S = 5.0  # seconds of waiting that one step of priority is worth
MAX_SLO_S = 60.0  # a later deadline counts as this one


def by_turn(seq: Seq) -> tuple[float, ...]:
    """FCFS: order of arrival, shifted by priority, deadline and fairness where the request has them."""
    return (seq.turn, seq.id)


def by_state(seq: Seq) -> tuple[float, ...]:
    """STATE: sequences that were never preempted first, and those that were MAX_DEMOTIONS times or more."""
    return (0 < seq.num_preemptions < MAX_DEMOTIONS, seq.turn, seq.id)


def level_of(seq: Seq) -> int:
    """MLFQ level: one down each time the answer doubles past QUANTUM, one up with each preemption."""
    num_output = len(seq.token_ids) - seq.num_prompt
    return max(0, min(MAX_LEVEL, (num_output // QUANTUM).bit_length()) - seq.num_preemptions)


def by_level(seq: Seq) -> tuple[float, ...]:
    """MLFQ: short answers first; within a level as STATE."""
    return (level_of(seq), *by_state(seq))


def by_feedback(seq: Seq) -> tuple[float, ...]:
    """MLFQ for waiting sequences: one level down equals LEVEL_STEP_S less waiting, so newcomers overtake only for a
    while.
    """
    return (seq.turn + level_of(seq) * LEVEL_STEP_S, seq.id)


_WAITING = {0: by_turn, 1: by_turn, 3: by_feedback}
_RUNNING = {0: by_turn, 1: by_state, 3: by_level}


def policy_of(prefill: int = 0, decode: int = 0) -> Policy:
    """The policy for the two numbers of a configuration: 0 FCFS, 1 STATE, 3 MLFQ.

    Under the first two, waiting sequences go by turn: a preempted one is older than those that have never run, so it
    comes back first. Under MLFQ a sequence with a long answer lets newcomers overtake it for a while.
    """
    return Policy(_WAITING[prefill], _RUNNING[decode])


class Turns:
    """Computes each request's turn: the arrival time that it would have had without privileges.

    turn = start + slo - default slo + (priority - middle) * PRIORITY_STEP_S, with every term bounded: of two requests
    of one tenant, the one that arrived more than `max_lead_s` earlier goes first, whatever the other asks for.

    With `token_s` above 0 tenants share fairly: a tenant's next request starts when its last one would have been served
    at `token_s` a token. So a tenant with many requests queues behind itself, not before others.
    """

    max_lead_s = MAX_SLO_S + (MAX_PRIORITY - 1) * PRIORITY_STEP_S

    def __init__(self, token_s: float = 0.0) -> None:
        self._token_s = token_s
        self._served_until: dict[str, float] = {}

    def turn(
        self, now_s: float, num_tokens: int, tenant: str = "", priority: int = 0, slo_s: float = MAX_SLO_S
    ) -> float:
        """The turn of a request that arrives now with `num_tokens` to serve (prompt and answer)."""
        if not 0 <= priority <= MAX_PRIORITY:
            raise BadRequest("priority", f"must be between 0 and {MAX_PRIORITY}, got {priority}")
        if not slo_s > 0:
            raise BadRequest("slo", f"must be above 0, got {slo_s:g}")
        start_s = now_s
        if self._token_s > 0:
            self._forget(now_s)
            start_s = max(now_s, self._served_until.get(tenant, now_s))
            self._served_until[tenant] = start_s + num_tokens * self._token_s
        middle = (1 + MAX_PRIORITY) // 2
        return start_s + min(slo_s, MAX_SLO_S) - MAX_SLO_S + ((priority or middle) - middle) * PRIORITY_STEP_S

    def _forget(self, now_s: float) -> None:
        """Forget tenants whose share has been used up by time: they count as new."""
        self._served_until = {tenant: until_s for tenant, until_s in self._served_until.items() if until_s > now_s}
