"""SDK and agents with and without the C++ libraries work together: each finds the blocks of the others, of any size."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from ems import CcResult
from ems.buffer import HostTensors, RegisteredCache
from ems.context_caching import ContextCaching
from ems.native.tensors import NativeHostTensors
from kvloom.pool.agent import Agent
from kvloom.pool.config import Address
from kvloom.pool.storage.native.pool import NativePool
from kvloom.pool.storage.store import TenantPool
from tests.support.pool.agents import BLOCK_SIZE, SECRET, running_agent, session, slots_of
from tests.support.waiting import until

KINDS = ("native", "python")
NUM_BLOCKS = 24
TOKEN_BYTES = (24, 1000, 4096, 16384)  # blocks of 96 bytes, 4,000 bytes, 16 KiB and 64 KiB
POOLS = {"native": NativePool, "python": TenantPool}
TENSORS = {"native": NativeHostTensors, "python": HostTensors}
pytestmark = pytest.mark.usefixtures("native")


@contextmanager
def of_kind(kind: str) -> Iterator[None]:
    """Sessions and agents that are opened inside use the C++ libraries, or do without them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EMS_NATIVE", "1" if kind == "native" else "0")
        yield


@contextmanager
def agent_of(kind: str, **changes: object) -> Iterator[Agent]:
    with ExitStack() as stack:
        with of_kind(kind):
            agent = stack.enter_context(running_agent(**changes))
            assert isinstance(agent.node.pool("default"), POOLS[kind])
        yield agent


class Client:
    """A KV cache of known bytes, and a session of one kind."""

    def __init__(self, stack: ExitStack, kind: str, agent: Agent, token_bytes: int) -> None:
        self.kv = [[np.zeros((NUM_BLOCKS, BLOCK_SIZE, 1, token_bytes // 2), np.uint8) for _ in "kv"]]
        with of_kind(kind):
            assert isinstance(RegisteredCache(self.kv).tensors, TENSORS[kind])
            self.cc: ContextCaching = stack.enter_context(session(agent.config.socket, self.kv))

    def fill(self) -> None:
        for number, tensor in enumerate(self.kv[0]):
            tensor[:] = np.random.default_rng(number).integers(0, 256, tensor.shape, np.uint8)

    def clear(self) -> None:
        for tensor in self.kv[0]:
            tensor[:] = 0

    @staticmethod
    def arguments(how: str, first: int) -> tuple[tuple[list[int], ...], dict[str, list[int]]]:
        """The arguments to save or load all blocks: by hashes, or by tokens, with one less in the last block."""
        slots = slots_of(*range(NUM_BLOCKS))
        if how == "hashes":
            return (slots, list(range(first, first + NUM_BLOCKS)), [BLOCK_SIZE] * NUM_BLOCKS), {}
        return (slots[:-1],), {"token_ids": list(range(first, first + len(slots) - 1))}

    def save(self, how: str, first: int = 0) -> CcResult:
        self.fill()
        arguments, keywords = self.arguments(how, first)
        return self.cc.save(*arguments, **keywords)

    def load(self, how: str, first: int = 0) -> CcResult:
        """Loads all blocks and compares every byte."""
        self.fill()
        truth = [tensor.copy() for tensor in self.kv[0]]
        self.clear()
        arguments, keywords = self.arguments(how, first)
        found = self.cc.load(*arguments, **keywords)
        for tensor, true in zip(self.kv[0], truth, strict=True):
            there = NUM_BLOCKS * BLOCK_SIZE - (how == "tokens") if found.success == NUM_BLOCKS else 0
            shape = (-1, tensor.shape[-1])
            assert (tensor.reshape(shape)[:there] == true.reshape(shape)[:there]).all()
        return found


WHOLE = CcResult(NUM_BLOCKS, NUM_BLOCKS)


@pytest.mark.parametrize("how", ["hashes", "tokens"])
@pytest.mark.parametrize("token_bytes", TOKEN_BYTES)
@pytest.mark.parametrize("agents", KINDS)
def test_what_one_kind_of_sdk_saves_either_loads(agents, token_bytes, how):
    with ExitStack() as stack:
        agent = stack.enter_context(agent_of(agents))
        clients = {kind: Client(stack, kind, agent, token_bytes) for kind in KINDS}
        for first, saver, loader in ((0, "native", "python"), (100, "python", "native")):
            assert clients[loader].load(how, first).success == 0
            assert clients[saver].save(how, first) == WHOLE
            assert clients[saver].load(how, first) == WHOLE
            assert clients[loader].load(how, first) == WHOLE
        agent.node.pool("default").check()


@pytest.mark.parametrize("token_bytes", TOKEN_BYTES)
@pytest.mark.parametrize("kinds", [(a, b) for a in KINDS for b in KINDS], ids="-".join)
def test_nodes_of_both_kinds_push_and_fetch_alike(kinds, token_bytes):
    """Each finds what the other saved, and holds the blocks whose home it is."""
    cluster = {"listen": ("127.0.0.1", 0), "secret": SECRET, "peers": (Address("x", "127.0.0.1", 1),)}
    with ExitStack() as stack:
        agents = [
            stack.enter_context(agent_of(kind, node_id=name, **cluster)) for kind, name in zip(kinds, "ab", strict=True)
        ]
        addresses = [Address(each.config.node_id, "127.0.0.1", each.peer_port) for each in agents]
        for agent in agents:
            agent.peers.set_members(addresses)
        here, there = (Client(stack, kind, agent, token_bytes) for kind, agent in zip(kinds, agents, strict=True))
        pools = [agent.node.pool("default") for agent in agents]
        for saver, loader, pool in ((here, there, pools[0]), (there, here, pools[1])):
            how = "hashes" if saver is here else "tokens"
            assert saver.save(how) == WHOLE
            until(lambda pool=pool: pool.counts["push_done"] > 0)
            until(lambda loader=loader, how=how: loader.load(how) == WHOLE)  # true once all pushes are done
        for pool in pools:
            until(
                lambda pool=pool: pool.counts["peer_reads"] and pool.counts["peer_writes"]
            )  # counted after the answer
            assert pool.counts["corrupt_on_wire"] == 0
            pool.check()


@pytest.mark.parametrize("how", ["hashes", "tokens"])
@pytest.mark.parametrize("kinds", [(a, b) for a in KINDS for b in KINDS], ids="-".join)
def test_a_snapshot_of_one_kind_is_read_by_the_other(kinds, how, tmp_path):
    """The SDK's sessions survive the agent's restart."""
    before, after = kinds
    socket, kept = tmp_path / "ems.sock", tmp_path / "kept"
    with ExitStack() as stack:
        with agent_of(before, socket=socket, snapshot_dir=kept) as agent:
            clients = [Client(stack, kind, agent, 4096) for kind in KINDS]
            assert clients[0].save(how) == WHOLE
        with agent_of(after, socket=socket, snapshot_dir=kept) as agent:
            until(lambda: not list(kept.glob("*.ems")))
            assert [client.load(how) for client in clients] == [WHOLE, WHOLE]
            agent.node.pool("default").check()
