"""Whether a draft model changes an answer: many prompts, with and without, in this process.

    python -m benches.engine.drafts MODEL DRAFT_MODEL [--prompts 1000] [--first 0] [--tokens 24]

The prompts are parts of this project's documents, and answered in company, greedily, by seed and with penalties in
turns. Answers with the draft model come twice: with as many guesses as pay, and with four guesses in each step whatever
they cost. One JSON line each; a line names the prompts whose answers differ, and the exit status is then 1. With
`--first` a run begins behind so many prompts, so that several runs make one.

A draft model can be made of the model itself, by fewer layers or fewer bits: see benches/server/speculation.py.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvloom.checkpoints.demo_models import find_model
from kvloom.contract.config import EngineConfig
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.link.executor import InProcessExecutor
from kvloom.engine.schedule.by_model import FREE
from kvloom.engine.schedule.pace import Pace
from kvloom.engine.text.tokenizer import Tokenizer, load_tokenizer
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner

DOCS = Path(__file__).parents[2] / "docs"
LENGTHS = (16, 40, 75, 130)  # tokens of prompts
ALWAYS = 4  # guesses of a step, where they are made whatever they cost
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 7},
    {"temperature": 0, "repetition_penalty": 1.2},
    {"temperature": 1.0, "top_k": 40, "frequency_penalty": 0.5, "seed": 11},
)


def requests(tokenizer: Tokenizer, numbers: range, num_tokens: int) -> list[Request]:
    text = "\n".join(path.read_text() for path in sorted(DOCS.rglob("*.md")))
    ids = tokenizer.encode(text)
    found = []
    for i in numbers:
        first = i * 97 % (len(ids) - LENGTHS[-1])
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, **KINDS[i % len(KINDS)])
        found.append(Request(str(i), tuple(ids[first : first + LENGTHS[i % 3 + i % 2]]), params))
    return found


class Eager(Pace):
    """Drafts whatever the draft model guesses."""

    def least_chance(self, base: Any, most: int) -> float:
        return 0.0

    def draft_lengths(self, guesses: Sequence[Any], base: Any) -> list[int]:
        return [min(ALWAYS, len(chances)) for _, chances, _ in guesses]

    def draft_rate(self, seq: Any, chances: Sequence[float], price: Any, base: Any) -> float:
        return float(price is not FREE)


def answers(
    runner: ModelRunner, config: EngineConfig, tokenizer: Tokenizer, asked: Sequence[Request], pace: type[Pace]
):
    """The tokens of each answer, and a line of figures."""
    engine = Engine(config, InProcessExecutor(runner), tokenizer)
    engine._drafting._pace = engine._pace = pace(config.max_gap_s, config.step_timeout_s)
    started_s = time.perf_counter()
    for request in asked:
        engine.add(request)
    found: dict[str, list[int]] = {request.id: [] for request in asked}
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id] += delta.token_ids
    stats = engine.stats()
    figures = {
        "first": int(asked[0].id),
        "prompts": len(asked),
        "tokens": stats.total_output_tokens,
        "steps": stats.total_steps,
        "drafted": stats.total_draft_tokens,
        "accepted": stats.total_accepted_tokens,
        "seconds": round(time.perf_counter() - started_s, 1),
    }
    engine.reset_prefix_cache()
    return found, figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("draft_model")
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=24)
    args = parser.parse_args()
    model, draft = (str(find_model(name)) for name in (args.model, args.draft_model))
    tokenizer = load_tokenizer(model)
    sizes = {"model": model, "num_blocks": 1500, "max_seq_len": 512, "max_batch": 16}
    asked = requests(tokenizer, range(args.first, args.first + args.prompts), args.tokens)
    wanted: dict[str, list[int]] = {}
    status = 0
    for side, pace, fields in (
        ("none", Pace, {"num_speculative_tokens": 0}),
        ("as many as pay", Pace, {"draft_model": draft}),
        ("always", Eager, {"draft_model": draft}),
    ):
        config = EngineConfig(**sizes, **fields)
        runner = open_runner(config, sorted(tokenizer.eos_ids), lambda done, total: None)
        found, figures = answers(runner, config, tokenizer, asked, pace)
        wanted = wanted or found
        other = [id for id, tokens in found.items() if tokens != wanted[id]]
        print(json.dumps({"bench": "drafts", "guesses": side, **figures, "differ": other[:20]}), flush=True)
        status |= bool(other)
        del runner
    sys.exit(status)


if __name__ == "__main__":
    main()
