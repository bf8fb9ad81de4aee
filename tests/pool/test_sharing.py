"""Tenants on one node through the SDK: guaranteed memory is available at once, and refusals give the reason."""

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from ems.context_caching import ContextCaching
from kvloom.pool.auth import new_credential
from kvloom.pool.config import TenantLimits
from kvloom.pool.metrics import render
from kvloom.pool.node import collect
from tests.support.pool.agents import BLOCK_SIZE, SECRET, running_agent, session, slots_of
from tests.support.pool.stores import emptied
from tests.support.waiting import until

KEY = "0123456789abcdef" * 4
BLOCK_BYTES = 32 << 10
POOL = 4 << 20


class Tenant:
    """A tenant's engine. The bytes of its blocks follow from their hashes."""

    def __init__(self, stack: ExitStack, socket: Path, name: str) -> None:
        self.tensor = torch.zeros((32, BLOCK_SIZE, 1, BLOCK_BYTES // BLOCK_SIZE), dtype=torch.uint8)
        self.cc: ContextCaching = stack.enter_context(session(socket, [[self.tensor]], access_id=name, access_key=KEY))
        self._rows = self.tensor.view(32, BLOCK_BYTES).numpy()

    def save(self, hashes: range) -> int:
        """Saves blocks of `hashes` one by one; returns how many were stored."""
        count = 0
        for block_hash in hashes:
            self._rows[0] = np.random.default_rng(block_hash).integers(0, 256, BLOCK_BYTES, np.uint8)
            count += self.cc.save(slots_of(0), [block_hash], [BLOCK_SIZE]).success
        return count

    def load(self, hashes: range) -> int:
        """Loads blocks of `hashes` one by one; returns how many were found. Their bytes must be right."""
        count = 0
        for block_hash in hashes:
            if self.cc.load(slots_of(1), [block_hash], [BLOCK_SIZE]).success:
                truth = np.random.default_rng(block_hash).integers(0, 256, BLOCK_BYTES, np.uint8)
                assert (self._rows[1] == truth).all()
                count += 1
        return count


@pytest.fixture
def node():
    """An agent, and the engines of its two tenants."""
    with ExitStack() as stack:
        agent = stack.enter_context(
            running_agent(pool_bytes=POOL, segment_bytes=1 << 20, slab_bytes=1 << 18, is_open=False, secret=SECRET)
        )
        credentials = [new_credential(name, name, KEY) for name in "ab"]
        agent.node.replace_credentials(credentials)
        yield agent, *(Tenant(stack, agent.config.socket, name) for name in "ab")


def refused(agent, tenant: str) -> dict[str, int]:
    text = render([collect(agent.node, {})]).decode()
    rows = [line for line in text.splitlines() if line.startswith("ems_refused_total") and f'tenant="{tenant}"' in line]
    return {row.split('cause="')[1].split('"')[0]: int(float(row.rpartition(" ")[2])) for row in rows}


def test_a_guarantee_given_later_holds_at_once(node):
    agent, first, second = node
    assert first.save(range(128)) == 128
    assert second.save(range(8)) == 0
    assert refused(agent, "b") == {"node_full": 8}
    assert agent.node.set_limits(TenantLimits("b", 1 << 20, 2 << 20)) == []
    assert (second.save(range(32)), second.load(range(32))) == (32, 31), "and room is made for the next"
    assert first.load(range(128)) >= 95, "no more went than was needed"
    assert first.save(range(1000, 1100)) == 100


def test_a_quota_that_is_cut_hands_memory_to_others(node):
    agent, first, second = node
    assert first.save(range(128)) == 128
    assert agent.node.set_limits(TenantLimits("a", 0, 1 << 20)) == []
    assert (second.save(range(96)), second.load(range(96))) == (96, 95)
    assert first.save(range(200, 210)) == 10


def test_memory_of_a_tenant_that_was_evicted_or_revoked_is_everybodys(node):
    agent, first, second = node
    assert first.save(range(128)) == 128
    until(lambda: agent.node.pool("a").evict(POOL) == 0 == agent.node.pool("a").usage()["blocks"])
    assert second.save(range(128)) == 128
    agent.node.replace_credentials([new_credential("a", "a", KEY)])
    assert agent.node.pool("b").usage()["capacity_bytes"] == 0
    assert agent.node.pool("a").usage()["blocks"] == 0


def test_a_client_lets_go_of_memory_that_was_given_back(node):
    agent, first, _second = node

    def mapped() -> int:
        return sum("ems-pool" in line and " r--s " in line for line in Path("/proc/self/maps").read_text().splitlines())

    assert (first.save(range(128)), first.load(range(128))) == (128, 127)
    assert mapped() == 4
    emptied(agent.node.pool("a"))
    assert first.save(range(1)) == first.load(range(1)) == 1
    assert mapped() == 1


def test_limits_that_move_from_one_tenant_to_another_are_all_set(node):
    agent, *_tenants = node
    half = POOL // 2
    assert agent.node.set_limits(TenantLimits("a", POOL, POOL)) == []
    assert agent.node.set_limits(TenantLimits("b", half, POOL), TenantLimits("a", half, POOL)) == []
    too_much = TenantLimits("c", 4096, POOL)
    assert agent.node.set_limits(too_much) == [too_much]
