"""Masks: how much slower plain requests of a batch become when structured instead of plain requests join it.

`python -m benches.engine.masks` prints one JSON line: the time of the plain requests' tokens once the others have
joined, with plain and with structured ones (medians of interleaved rounds); the median ratio of a round, at most 1.05;
the longest step of each; and the time of the first step with a structured request.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

from kvloom.checkpoints.demo_models import pull
from kvloom.contract.config import EngineConfig
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.engine.link.ranks import RankExecutor
from kvloom.engine.text.tokenizer import Tokenizer, load_tokenizer
from kvloom.rank.opening import open_ranks
from kvloom.server.chat.grammars import json_grammar

NUM_OUTPUT = 96
NUM_BEFORE = 8  # steps of the plain requests alone
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 100}  # no answer reaches the end
PROMPT = "The history of the lighthouse begins long before electricity, when a keeper"


def steps_s(
    executor: RankExecutor, tokenizer: Tokenizer, num_plain: int, num_joining: int, grammar: str
) -> list[float]:
    """Seconds of each step after the others have joined, until the plain requests end."""
    engine = Engine(EngineConfig(model="m", enable_prefix_cache=False), executor, tokenizer)
    ids = tuple(tokenizer.encode(PROMPT))

    def add(name: str, count: int, grammar: str) -> None:
        params = SamplingParams(temperature=0.8, seed=1, max_tokens=NUM_OUTPUT, ignore_eos=True, grammar=grammar)
        for i in range(count):
            engine.add(Request(f"{name}{i}", ids, params))

    add("plain", num_plain, "")
    for _ in range(NUM_BEFORE):
        engine.step()
    add("joining", num_joining, grammar)
    found = []
    for _ in range(NUM_OUTPUT - NUM_BEFORE - 1):
        start = time.perf_counter()
        engine.step()
        found.append(time.perf_counter() - start)
    while engine.has_work:
        engine.step()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="a folder or .gguf file; the demo model by default")
    parser.add_argument("--plain", type=int, default=6)
    parser.add_argument("--joining", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    model = args.model or pull("smollm2")
    tokenizer = load_tokenizer(model)
    executor = open_ranks(EngineConfig(model=str(model), backend="cpu", weight_format="stored", num_blocks=256), list)
    kinds = {"plain": "", "structured": json_grammar(SCHEMA, "schema")}
    steps_s(executor, tokenizer, args.plain, args.joining, "")
    first_s = max(steps_s(executor, tokenizer, args.plain, args.joining, kinds["structured"])[:2])
    totals: dict[str, list[float]] = {kind: [] for kind in kinds}
    longest: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind, grammar in kinds.items():
            found = steps_s(executor, tokenizer, args.plain, args.joining, grammar)
            totals[kind].append(sum(found))
            longest[kind].append(max(found))
    plain, structured = (statistics.median(totals[kind]) for kind in kinds)
    ratios = [b / a for a, b in zip(totals["plain"], totals["structured"], strict=True)]
    report = {
        "bench": "masks", "plain_requests": args.plain, "joining": args.joining,
        "plain_ms": round(plain * 1e3, 1), "structured_ms": round(structured * 1e3, 1),
        "ratio": round(statistics.median(ratios), 3), "first_structured_step_ms": round(first_s * 1e3, 1),
        **{f"longest_step_{kind}_ms": round(statistics.median(longest[kind]) * 1e3, 1) for kind in kinds},
    }  # fmt: skip
    print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
