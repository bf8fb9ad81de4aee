"""Running ahead: a step is planned and sent while the one before it is under way. Pure.

Ranks run steps in the order they are sent, and know the tokens they choose. So the step after one that decodes can be
planned as if every sequence had got its token, and every prompt its part: what the engine learns too late (an end of
sequence, a stop string, an abort, a grammar that was not ready) costs a row that nobody takes, or a prompt's part. A
block given to another sequence meanwhile is safe, for that sequence's steps come behind the row that may still write
there; a full block is never written.
"""

from kvloom.engine.schedule.seq import Plan, Seq, Status


def may_follow(under_way: Plan) -> bool:
    """Whether a step may be planned behind this one before its tokens are known.

    Not behind prompts alone: such a step takes long enough, and whoever comes meanwhile would wait for one more. Beside
    decodes they are kept short. Not behind suspects, of whom no second step is to be under way when the rank dies.
    """
    steps = under_way.steps
    if steps and all(step.num_tokens > 1 for step in steps):
        return False
    return all(step.seq.status is not Status.RUNNING or _goes_on(step.seq) for step in steps)


def must_wait(plan: Plan) -> bool:
    """Whether a plan that was made behind a step under way is not to be carried out before that step's end.

    Who gives way is decided when it is known who has ended.
    """
    return bool(plan.preempted) or not (plan.steps or plan.loads)


def _goes_on(seq: Seq) -> bool:
    """Whether what it computes next does not depend on the token before."""
    return seq.may_run_ahead and not seq.is_suspect
