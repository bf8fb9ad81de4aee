"""Prompt lookup: greedy tokens a second with and without drafts, on repetitive text and on other text.

`python -m benches.engine.speculation [--tokens 4]` prints one JSON line a text: medians of interleaved rounds, their
ratio, and the share of accepted draft tokens. The answers are compared: they must be the same.
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
from kvloom.engine.link.executor import InProcessExecutor
from kvloom.engine.text.tokenizer import Tokenizer, load_tokenizer
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner

NUM_OUTPUT = 128
CODE = (
    "class Account:\n    def __init__(self, name, balance):\n"
    "        self.name = name\n        self.balance = balance\n\n"
    "    def deposit(self, amount):\n        self.balance = self.balance + amount\n        return self.balance\n\n"
)
TEXTS = {
    "edit": f"Here is the code:\n{CODE}Here is the same code with a withdraw method added:\n{CODE[:40]}",
    "prose": "The history of the lighthouse begins long before electricity, when a keeper",
}


def answer(
    runner: ModelRunner, tokenizer: Tokenizer, text: str, num_speculative: int
) -> tuple[list[int], float, float]:
    """Tokens, tokens a second after the first one, and the share of accepted draft tokens."""
    config = EngineConfig(model="m", num_speculative_tokens=num_speculative, enable_prefix_cache=False)
    engine = Engine(config, InProcessExecutor(runner), tokenizer)
    params = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    engine.add(Request("a", tuple(tokenizer.encode(text)), params))
    tokens: list[int] = []
    start = 0.0
    while engine.has_work:
        tokens += [token for delta in engine.step() for token in delta.token_ids]
        start = start or time.perf_counter()
    stats = engine.stats()
    share = stats.total_accepted_tokens / max(1, stats.total_draft_tokens)
    return tokens, (NUM_OUTPUT - 1) / (time.perf_counter() - start), share


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="a folder or .gguf file; the demo model by default")
    parser.add_argument("--tokens", type=int, default=4, help="tokens guessed ahead")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    model = args.model or pull("smollm2")
    tokenizer = load_tokenizer(model)
    config = EngineConfig(model=str(model), backend="cpu", weight_format="stored", num_blocks=64)
    runner = open_runner(config, [], lambda done, total: None)
    for name, text in TEXTS.items():
        rates: dict[int, list[float]] = {0: [], args.tokens: []}
        answers, share = set(), 0.0
        for _ in range(args.rounds):
            for count, found in rates.items():
                tokens, rate, share = answer(runner, tokenizer, text, count)
                found.append(rate)
                answers.add(tuple(tokens))
        assert len(answers) == 1, "a guess changed the answer"
        plain, guessing = (statistics.median(found) for found in rates.values())
        report = {
            "bench": "speculation", "text": name, "guessed_ahead": args.tokens, "plain_tok_s": round(plain, 1),
            "guessing_tok_s": round(guessing, 1), "ratio": round(guessing / plain, 2), "accepted": round(share, 2),
        }  # fmt: skip
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
