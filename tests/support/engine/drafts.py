"""Engines that draft all that is guessed, whatever it costs: what fake and tiny models take says nothing of profit; and
what every kind of draft model must do in them.
"""

from dataclasses import replace

import pytest

from kvloom.contract.config import EngineConfig, TierConfig
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.schedule.by_model import FREE
from kvloom.engine.schedule.pace import Pace
from kvloom.rank.byte_tokenizer import ByteTokenizer
from tests.support.engine.engines import run_all, tokens_of
from tests.support.engine.executors import opened
from tests.support.pool.agents import running_agent


def draft_always(patch: pytest.MonkeyPatch) -> None:
    """Until `patch` is undone. Where there is a draft model, its guesses are taken."""
    patch.setattr(Pace, "least_chance", lambda self, base, most: 0.0)
    patch.setattr(Pace, "draft_lengths", lambda self, guesses, base: [len(chances) for _, chances, _ in guesses])
    patch.setattr(Pace, "draft_rate", lambda self, seq, chances, price, base: float(price is not FREE))


def check_chained(engine: Engine, greedy: SamplingParams) -> None:
    """Assert that all is guessed right by what looks at states alone, of a model whose next token is always the next
    number: so states reach it, of the position before, and its own reach its next guess.
    """
    asked = [Request(id, tuple(range(first, first + 12)), greedy) for id, first in (("a", 1), ("b", 20))]
    found = run_all(engine, *asked)
    assert [tokens_of(found[id])[:3] for id in "ab"] == [[13, 14, 15], [32, 33, 34]]
    stats = engine.stats()
    assert stats.total_accepted_tokens == stats.total_draft_tokens > 30
    again = run_all(engine, Request("c", asked[0].prompt_ids, greedy))  # its prompt is in the cache
    assert tokens_of(again["c"]) == tokens_of(found["a"])
    stats = engine.stats()
    assert stats.total_accepted_tokens == stats.total_draft_tokens


def check_behind_pool(config: EngineConfig, asked: Request, want: list[int]) -> None:
    """Assert that an answer and its guesses are right where its prompt was computed, and where it comes from a pool."""
    with running_agent(pool_bytes=64 << 20) as agent:
        tier = TierConfig("kvloom.rank.tier.ems:open_tier", 30.0, {"socket": str(agent.config.socket)}, is_watched=True)
        config = replace(config, kv_tier=tier)
        for is_warm in (False, True):
            with opened(config) as executor:
                engine = Engine(config, executor, ByteTokenizer())
                assert tokens_of(run_all(engine, asked)[asked.id]) == want
                stats = engine.stats()
                assert (stats.total_tier_loaded_blocks > 0) == is_warm
                assert stats.total_accepted_tokens == stats.total_draft_tokens > 0
