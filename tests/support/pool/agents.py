"""Agents in this process, KV caches with known bytes, and SDK sessions on them."""

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import typer
from typer.main import get_command

from ems import CcConfig_v1
from ems.config import EmsConfig
from ems.context_caching import ContextCaching
from ems.profiling import Profiler
from ems.transport import LinkPool
from kvloom.pool.agent import Agent, prepare_libraries
from kvloom.pool.config import Address, AgentConfig
from kvloom.pool.options import parse
from kvloom.pool.storage.entries import Block
from kvloom.pool.storage.pool import Pool

BLOCK_SIZE = 4
SMALL = AgentConfig(pool_bytes=8 << 20, segment_bytes=1 << 20, slab_bytes=1 << 18, is_prefaulted=False)
SECRET = b"a cluster secret of thirty-two bytes and more"


@contextlib.contextmanager
def running_agent(**changes: Any) -> Iterator[Agent]:
    """An agent in this process on its own socket; `changes` are fields of AgentConfig."""
    with tempfile.TemporaryDirectory() as folder:
        config = replace(SMALL, **{"socket": Path(folder) / "ems.sock", **changes})
        prepare_libraries(config)
        agent = Agent(config)
        agent.start()
        try:
            yield agent
        finally:
            agent.close()


def config_of(*arguments: str) -> AgentConfig:
    """The configuration that `kvloom pool agent` makes of a command line; raises the same errors."""
    app = typer.Typer()
    app.command()(parse)
    made: AgentConfig = get_command(app).main(list(arguments), standalone_mode=False)
    return made


def new_kv(
    num_blocks: int = 64, seed: int = 0, layers: int = 2, heads: int = 2, dim: int = 8
) -> list[list[torch.Tensor]]:
    """A KV cache of random float16 numbers: layers of [K, V], each [num_blocks, BLOCK_SIZE, heads, dim]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, BLOCK_SIZE, heads, dim)
    return [[torch.randn(shape, generator=generator).half() for _ in range(2)] for _ in range(layers)]


def zero(kv: list[list[torch.Tensor]]) -> None:
    for layer in kv:
        for tensor in layer:
            tensor.zero_()


def copy_of(kv: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    return [[tensor.clone() for tensor in layer] for layer in kv]


def tokens_of(kv: list[list[torch.Tensor]], slots: list[int]) -> torch.Tensor:
    """The contents of slots, [slots, elements of a token]."""
    return torch.cat([tensor.flatten(0, 1)[slots].flatten(1) for layer in kv for tensor in layer], dim=1)


def blocks_of(pool: Pool) -> list[Block]:
    """All blocks of a pool, oldest first, not pinned."""
    found = [block for block in pool.pin_each(pool.block_keys()) if block is not None]
    pool.unpin(found)
    return found


def slots_of(*blocks: int) -> list[int]:
    return [block * BLOCK_SIZE + i for block in blocks for i in range(BLOCK_SIZE)]


@contextlib.contextmanager
def session(
    socket: Path, kv: list[list[torch.Tensor]], *, access_id: str = "", access_key: str = "", **identity: Any
) -> Iterator[ContextCaching]:
    """A ContextCaching independent of the process's `Ems`; `identity` are fields of CcConfig_v1."""
    config = CcConfig_v1(**{"rank_id": 0, "device_id": 0, "model_id": "test-model", **identity})
    EmsConfig(access_id or None, access_key or None, config).validate()
    links = LinkPool(lambda _deadline_s: socket, access_id, access_key)
    profiler = Profiler()
    caching = ContextCaching(links, config, profiler)
    caching.register_kvcache(kv)
    try:
        yield caching
    finally:
        caching.close()
        links.close()
        profiler.close()


def shared_files() -> set[str]:
    """Names of the pool's files in /dev/shm; other programs' files come and go there."""
    return {path.name for path in Path("/dev/shm").glob("ems-*")}


@contextlib.contextmanager
def two_agents(**changes: Any) -> Iterator[tuple[Agent, Agent]]:
    """Two nodes of one cluster in this process."""
    cluster = {"listen": ("127.0.0.1", 0), "secret": SECRET, "peers": (Address("x", "127.0.0.1", 1),), **changes}
    with running_agent(node_id="a", **cluster) as a, running_agent(node_id="b", **cluster) as b:
        a.peers.set_members([Address("b", "127.0.0.1", b.peer_port)])
        b.peers.set_members([Address("a", "127.0.0.1", a.peer_port)])
        yield a, b


def has_pushed(*agents: Agent) -> bool:
    """Whether every block that the agents were to push to its home has arrived there or was given up."""
    return not any(link._pushes.unfinished_tasks for agent in agents for link in agent.peers._links.values())
