"""Running ahead: a step is planned and sent while the one before it is under way. Pure.

Ranks run steps in the order they are sent, and know the tokens they choose. So the step after one that decodes can be
planned as if every sequence had got its token and every prompt its part. What the engine learns too late (an end of
sequence, a stop string, an abort, a grammar whose mask was late) costs a row, or a prompt's part, that is thrown away.
A block given to another sequence meanwhile is safe: that sequence's steps come behind the row that may still write
there, and full blocks are never written.
"""

from kvloom.engine.schedule.seq import Plan, Seq, Status


def may_follow(under_way: Plan) -> bool:
    """Whether a step may be planned behind this one before its tokens are known.

    Not behind prompts alone: such a step is long, and a request that arrives during it would wait for one step more.
    Beside decodes prompts are kept short. Not behind suspects: when the rank dies, only one of their steps may be under
    way.
    """
    steps = under_way.steps
    if steps and all(step.num_tokens > 1 for step in steps):
        return False
    return all(step.seq.status is not Status.RUNNING or _goes_on(step.seq) for step in steps)


def must_wait(plan: Plan) -> bool:
    """Whether this plan, made behind a step under way, must not be carried out before that step ends.

    True when it preempts: which sequence gives way is decided when it is known which have ended.
    """
    return bool(plan.preempted) or not (plan.steps or plan.loads)


def _goes_on(seq: Seq) -> bool:
    """Whether what the sequence computes next does not depend on the token before."""
    return seq.may_run_ahead and not seq.is_suspect
