"""`benches.pool.values` measures calls that really moved the values."""

import contextlib

from benches.pool.values import Ems, measure

from tests.support.pool.agents import running_agent


def test_every_value_that_is_timed_was_stored_and_read():
    with running_agent() as agent, contextlib.closing(Ems(agent.config.socket)) as ems:
        row = measure({"ems": ems}, 4096, 8, 5)
        counts = agent.node.pools()[0].counts
    assert (counts["save_stored"], counts["load_hits"]) == (40, 40)
    assert (row["bytes"], row["batch"]) == (4096, 8)
    assert all(took > 0 for took in row["ems"].values())
