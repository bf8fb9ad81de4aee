"""The rank of the real small model is killed under mixed streams: every answer is that of an undisturbed run.

KVLOOM_TEST_KILLS=200 runs 32 streams with this many kills, and prints the lengths of the pauses.
"""

import asyncio
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.contract.config import EngineConfig
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.text.tokenizer import Tokenizer
from kvloom.engine.thread import EngineThread
from kvloom.rank.opening import open_engine
from kvloom.server.chat.grammars import json_grammar
from tests.support.engine.threads import rank_pid
from tests.support.models.adapters import make_adapter

pytestmark = [pytest.mark.real, pytest.mark.timeout(3600)]

NUM_KILLS = int(os.environ.get("KVLOOM_TEST_KILLS", "3"))
NUM_STREAMS, NUM_TOKENS = (32, 40) if NUM_KILLS > 10 else (8, 24)
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived an old woman who",
    "One two three one two three one two three one",
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}, "people": {"type": "integer", "maximum": 10**7}},
    "required": ["city", "people"],
    "additionalProperties": False,
}
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
Said = list[tuple[list[int], str]]  # tokens and text of each choice


def kinds(adapter: int) -> list[tuple[list[SamplingParams], int]]:
    """For each kind of request: the parameters of its choices, and its adapter."""
    seeded = replace(GREEDY, temperature=0.9, top_p=0.95, seed=3)
    grammar = replace(GREEDY, temperature=1.0, seed=5, ignore_eos=False, grammar=json_grammar(SCHEMA, "schema"))
    return [
        ([GREEDY], 0),
        ([seeded], 0),
        ([grammar], 0),
        ([replace(seeded, seed=11), replace(seeded, seed=12)], 0),
        ([GREEDY], adapter),
        ([replace(seeded, frequency_penalty=0.4, logprobs=2, prompt_logprobs=0)], 0),
    ]


@dataclass
class Streams:
    """Clients that ask repeatedly; compares each answer with `truth` and records its longest silence in `pauses_s`."""

    engine: EngineThread
    asked: Sequence[list[Request]]
    truth: dict[int, Said] = field(default_factory=dict)
    pauses_s: list[float] = field(default_factory=list)
    num_answers: int = 0
    num_asked: int = 0
    is_over: bool = False

    async def ask(self, index: int) -> Said:
        self.num_asked += 1
        requests = [replace(request, id=f"{self.num_asked}-{request.id}") for request in self.asked[index]]
        tokens: list[list[int]] = [[] for _ in requests]
        texts = [""] * len(requests)
        heard_s, longest_s = time.monotonic(), 0.0
        with self.engine.open(requests) as feed:
            while (step := await feed.get()) is not None:
                now_s = time.monotonic()
                longest_s, heard_s = max(longest_s, now_s - heard_s), now_s
                for choice, delta in step:
                    tokens[choice] += delta.token_ids
                    texts[choice] += delta.text
        self.pauses_s.append(longest_s)
        return list(zip(tokens, texts, strict=True))

    async def read(self, first: int) -> None:
        index = first
        while not self.is_over:
            index = (index + 7) % len(self.asked)
            assert await self.ask(index) == self.truth[index], self.asked[index]
            self.num_answers += 1

    def has_suspects(self) -> bool:
        return any(live.seq.is_suspect for live in list(self.engine._engine._seqs.values()))


def requests_of(tokenizer: Tokenizer, adapter: int) -> list[list[Request]]:
    asked = []
    for text in TEXTS:
        ids = tuple(tokenizer.encode(text))
        asked += [
            [Request(f"{choice}", ids, params, adapter=lora) for choice, params in enumerate(choices)]
            for choices, lora in kinds(adapter)
        ]
    return asked


def report(streams: Streams, away_s: Sequence[float]) -> None:
    """Print the figures of the run; every answer counted in them was compared."""
    stats = streams.engine.stats()
    print(
        f"\n{len(away_s)} kills, {streams.num_answers} answers, all equal; {stats.total_recomputed_tokens} tokens again"
    )
    pauses_s = [pause_s for pause_s in streams.pauses_s if pause_s > min(away_s)]
    for name, found in (
        ("until the model is back", sorted(away_s)),
        ("longest silence of an answer", sorted(pauses_s)),
    ):
        p50, p99 = (found[int(share * (len(found) - 1))] if found else 0.0 for share in (0.5, 0.99))
        print(f"{name}: {len(found)}, p50 {p50:.2f} s, p99 {p99:.2f} s", flush=True)


def test_a_rank_that_is_killed_at_random_moments_changes_no_answer(smollm2_path, tokenizer, tmp_path):
    dice = random.Random(17)
    shapes = open_checkpoint(smollm2_path).spec.tensor_shapes()
    folder = make_adapter(tmp_path / "adapter", shapes, 8, 8, size=0.3)
    config = EngineConfig(model=str(smollm2_path), num_blocks=1024, max_seq_len=256, num_speculative_tokens=3)

    async def body(engine: EngineThread) -> None:
        adapter = await engine.load_adapter(str(folder))
        streams = Streams(engine, requests_of(tokenizer, adapter.id))
        numbers = range(len(streams.asked))
        streams.truth.update(zip(numbers, await asyncio.gather(*map(streams.ask, numbers)), strict=True))
        streams.pauses_s.clear()
        readers = [asyncio.create_task(streams.read(i)) for i in range(NUM_STREAMS)]
        away_s = []
        for kill in range(NUM_KILLS):
            while engine.stats().num_running < NUM_STREAMS // 2 or streams.has_suspects():
                assert not any(reader.done() for reader in readers), [reader for reader in readers if reader.done()]
                await asyncio.sleep(0.005)
            await asyncio.sleep(dice.uniform(0, 0.4))
            os.kill(rank_pid(engine), signal.SIGKILL)
            killed_s = time.monotonic()
            while engine.stats().total_restarts <= kill or not engine.is_ready:
                await asyncio.sleep(0.005)
            away_s.append(time.monotonic() - killed_s)
            if NUM_KILLS > 10 and kill % 10 == 9:
                report(streams, away_s)
        streams.is_over = True
        await asyncio.gather(*readers)
        stats = engine.stats()
        assert (stats.total_crashes, stats.total_guilty) == (NUM_KILLS, 0)
        assert stats.total_resumed > NUM_KILLS

    async def main() -> None:
        engine = open_engine(config, lambda: tokenizer)
        engine.start(asyncio.get_running_loop())
        try:
            await body(engine)
        finally:
            await asyncio.to_thread(engine.close)

    asyncio.run(main())
