"""Models whose layers keep states, in a fleet: a conversation goes on when its replica is lost, and behind a prompt
that another replica computed, with the same tokens. Replicas are real engines with ranks and a real pool, without Ray.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kvloom.contract.config import TierConfig
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.fleet import replica as replicas_of_ray
from kvloom.fleet.args import FleetArgs
from kvloom.fleet.engine import FleetEngine, Way, Ways
from kvloom.fleet.lost import ReplicaLost
from kvloom.fleet.plan import make_plan
from kvloom.fleet.replica import EngineReplica
from kvloom.fleet.routing.board import Board
from kvloom.fleet.wire import Brought, decode_item
from tests.support.engine.greedy import prompt
from tests.support.models.byte_folder import VOCAB_SIZE, make_byte_folder
from tests.support.models.checkpoints import save, tiny_model
from tests.support.pool.agents import running_agent
from tests.support.waiting import until

MODELS = {"delta rule": ("qwen3.5", {"head_dim": 128}), "short convolution": ("lfm2", {"num_attention_heads": 2})}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@dataclass
class Replicas:
    """Calls go to the first one that is left. `dies_after`: tokens after which that one is ended, with its rank, once
    the pool has what it has.
    """

    left: list[EngineReplica]
    dies_after: int | None = None
    visited: list[str] = field(default_factory=list)
    num_tokens: int = 0

    async def call(self, data: bytes, hint: bytes) -> AsyncGenerator[bytes]:
        replica = self.left[0]
        self.visited.append(replica.name)
        async with aclosing(replica.stream(data)) as items:
            async for item in items:
                decoded = decode_item(item)
                self.num_tokens += len(decoded.deltas) if isinstance(decoded, Brought) else 0
                yield item
                if self.dies_after is not None and self.num_tokens >= self.dies_after:
                    self.dies_after = None
                    await asyncio.to_thread(until, lambda: is_saved(replica))
                    await asyncio.to_thread(self.left.pop(0).close)
                    raise ReplicaLost("killed")

    async def prefill(self, data: bytes, hint: bytes) -> AsyncGenerator[bytes]:
        async with aclosing(self.left[0].prefill(data)) as items:
            async for item in items:
                yield item


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, fields = MODELS[request.param]
    path = make_byte_folder(tmp_path_factory.mktemp("model"))
    (path / "model.safetensors").unlink()
    return save(tiny_model(name, vocab_size=VOCAB_SIZE, **fields), path)


@pytest.fixture
def socket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of the pool that all replicas have."""
    with running_agent(pool_bytes=64 << 20) as agent:
        tier = TierConfig("kvloom.rank.tier.ems:open_tier", 30.0, {"socket": str(agent.config.socket)})
        monkeypatch.setattr(replicas_of_ray, "pool_tier", lambda configured: tier)
        yield str(agent.config.socket)


def is_saved(replica: EngineReplica) -> bool:
    stats = replica.engine.stats()
    return not (stats.num_saving_blocks or stats.num_saving_states)


async def opened(folder: Path, name: str, has_pool: bool = True) -> EngineReplica:
    args = FleetArgs(model=str(folder), name="m", num_blocks=80, max_seq_len=320, max_batch=4, kv_pool=has_pool)
    replica = EngineReplica(make_plan(args), name, "n")
    await replica.start()
    return replica


def fleet_over(replicas: Replicas, prefill: Replicas | None = None) -> FleetEngine:
    ways = Ways(Way(replicas.call, Board()), prefill and Way(prefill.prefill, Board()))
    return FleetEngine(replicas.left[0].about(), ways)


async def talk(fleet: FleetEngine) -> list[list[int]]:
    """The answers of three turns."""
    history, found = list(prompt(100)), []
    for turn in range(3):
        history += prompt(20 + turn)
        asked = Request(f"turn {turn}", tuple(history), GREEDY)
        answer = [token async for delta in fleet.stream(asked) for token in delta.token_ids]
        found.append(answer)
        history += answer
    return found


async def alone(folder: Path) -> list[list[int]]:
    replica = await opened(folder, "alone", has_pool=False)
    found = await talk(fleet_over(Replicas([replica])))
    replica.close()
    return found


@pytest.mark.parametrize("dies_after", [1, 27])
def test_a_conversation_goes_on_at_another_replica_with_the_same_tokens(folder, socket, dies_after):
    async def run() -> None:
        both = [await opened(folder, "a"), await opened(folder, "b")]
        replicas = Replicas(list(both), dies_after)
        assert await talk(fleet_over(replicas)) == await alone(folder)
        assert replicas.visited == {1: ["a", "b", "b", "b"], 27: ["a", "a", "b", "b"]}[dies_after]
        assert both[1].engine.stats().total_tier_loaded_states > 0
        await asyncio.to_thread(both[1].close)

    asyncio.run(run())


def test_prompts_are_computed_on_one_replica_and_their_answers_on_another(folder, socket):
    async def run() -> None:
        first, second = await opened(folder, "prefill"), await opened(folder, "decode")
        found = await talk(fleet_over(Replicas([second]), Replicas([first])))
        assert found == await alone(folder)
        assert second.engine.stats().total_tier_loaded_states > 0
        for replica in (first, second):
            await asyncio.to_thread(replica.close)

    asyncio.run(run())
