"""Running ahead: a step is planned and sent while the one before it is under way. Pure.

Ranks run steps in the order they are sent, and know the tokens they choose. So the step after a decode can be planned
as if every sequence had got its token: what the engine learns too late (an end of sequence, a stop string, an abort, a
grammar that was not ready) costs a row that nobody takes. A block given to another sequence meanwhile is safe, for
that sequence's steps come behind the row that may still write there; a full block is never written.
"""

from kvloom.engine.schedule.seq import Plan, Seq, Status


def may_follow(under_way: Plan) -> bool:
    """Whether a step may be planned behind this one before its tokens are known.

    Not behind prompts: such a step takes long enough, and whoever comes meanwhile would wait for one more. Not behind
    suspects, of whom no second step is to be under way when the rank dies.
    """
    return all(step.seq.status is not Status.RUNNING or _goes_on(step.seq) for step in under_way.steps)


def must_wait(plan: Plan) -> bool:
    """Whether a plan that was made behind a step under way is not to be carried out before that step's end.

    Who gives way is decided when it is known who has ended.
    """
    return bool(plan.preempted) or not (plan.steps or plan.loads)


def _goes_on(seq: Seq) -> bool:
    """Whether it decodes, and needs not know the token to compute the one after it."""
    return seq.num_pending == 1 and seq.may_run_ahead and not seq.is_suspect
