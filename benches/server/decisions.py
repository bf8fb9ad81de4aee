"""Decisions about one input, beside the same questions asked as chats, on one server in the same run.

`python -m benches.server.decisions` serves a model and asks 16 questions (predicates, choices of four, scores of five)
about a letter of about 1,000 tokens that no request has had before, in rotating order:

  decisions      one request to /v1/decisions
  question_first a chat for each question, one after another: the question is the system message, the letter the user's,
                 as instructions usually come first
  input_first    a chat for each question, one after another, with the letter first, so that the server finds it in its
                 prefix cache from the second question on
  ..._together   the same chats, all sent at once

Chats are greedy, and may write one of the answers and nothing else (structured_outputs.choice), so that they are as
short as can be. One JSON line: medians of the rounds in seconds, and how many times longer than decisions each takes.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx

from kvloom.bench.client import Target
from kvloom.bench.process import ServerProcess

PORT = 8114
LIMIT_S = 600.0
NUM_QUESTIONS = 16
WORDS = [
    "invoice",
    "refund",
    "parcel",
    "late",
    "broken",
    "agent",
    "reply",
    "week",
    "order",
    "charge",
    "button",
    "page",
    "account",
    "phone",
    "letter",
    "price",
]
SCALE = ["not at all", "a little", "somewhat", "clearly", "very much"]
TEAMS = ["billing", "shipping", "technical support", "legal"]
Ask = Callable[[httpx.AsyncClient, str], Awaitable[None]]


def letter(draw: random.Random, num_words: int) -> str:
    return f"Letter {draw.random()}. " + " ".join(draw.choice(WORDS) for _ in range(num_words))


def questions() -> list[dict[str, Any]]:
    """As /v1/decisions takes them."""
    found: list[dict[str, Any]] = []
    for index in range(NUM_QUESTIONS):
        word = WORDS[index]
        if index % 3 == 0:
            found.append({"type": "predicate", "instructions": f"Does the customer complain about the {word}?"})
        elif index % 3 == 1:
            choices = [{"value": team} for team in TEAMS]
            asked = f"Which team should answer the part about the {word}?"
            found.append({"type": "choice", "instructions": asked, "choices": choices})
        else:
            levels = [{"label": label} for label in SCALE]
            found.append({"type": "score", "instructions": f"How urgent is the {word}?", "levels": levels})
    return found


def labels_of(question: dict[str, Any]) -> list[str]:
    if question["type"] == "predicate":
        return ["yes", "no"]
    return TEAMS if question["type"] == "choice" else SCALE


async def decide(client: httpx.AsyncClient, text: str) -> None:
    body = {"model": "m", "input": text, "questions": questions()}
    answers = (await client.post("/v1/decisions", json=body)).raise_for_status().json()["answers"]
    assert len(answers) == NUM_QUESTIONS


async def chat(client: httpx.AsyncClient, text: str, question: dict[str, Any], is_input_first: bool) -> None:
    labels = labels_of(question)
    asked = f"{question['instructions']} Answer with one of: {', '.join(labels)}."
    turns = [{"role": "system", "content": asked}, {"role": "user", "content": text}]
    if is_input_first:
        turns = [{"role": "user", "content": f"{text}\n\n{asked}"}]
    body = {"model": "m", "messages": turns, "temperature": 0, "structured_outputs": {"choice": labels}}
    answer = (await client.post("/v1/chat/completions", json=body)).raise_for_status().json()
    assert answer["choices"][0]["message"]["content"] in labels


def chats(is_input_first: bool, is_together: bool) -> Ask:
    async def ask(client: httpx.AsyncClient, text: str) -> None:
        asked = [chat(client, text, question, is_input_first) for question in questions()]
        if is_together:
            await asyncio.gather(*asked)
            return
        for each in asked:
            await each

    return ask


WAYS: dict[str, Ask] = {
    "decisions": decide,
    "question_first": chats(is_input_first=False, is_together=False),
    "input_first": chats(is_input_first=True, is_together=False),
    "question_first_together": chats(is_input_first=False, is_together=True),
    "input_first_together": chats(is_input_first=True, is_together=True),
}


async def measured(chosen: Sequence[str], num_words: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, after one with a short letter that is not counted."""
    draw, found = random.Random(time.time_ns()), {name: list[float]() for name in chosen}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORT}", timeout=LIMIT_S) as client:
        for number in range(rounds + 1):
            names = list(found)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                text, start = letter(draw, num_words if number else 20), time.perf_counter()
                await WAYS[name](client, text)
                if number:
                    found[name].append(time.perf_counter() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS), help="decisions is always one")
    parser.add_argument("--words", type=int, default=900)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    flags = ["--port", str(PORT), "--served-model-name", "m"]
    with ServerProcess([sys.executable, "-m", "kvloom.cli", "serve", options.model, *flags]) as server:
        server.first_answer_s(Target(f"http://127.0.0.1:{PORT}", "m"), 300, [1000] * 16)
        ways = dict.fromkeys(["decisions", *options.ways])
        found = asyncio.run(measured(list(ways), options.words, options.rounds))
    medians = {name: statistics.median(values) for name, values in found.items()}
    told: dict[str, Any] = {"bench": "decisions", "model": options.model, "words": options.words}
    told |= {"questions": NUM_QUESTIONS, "rounds": options.rounds}
    told |= {f"{name}_s": round(value, 3) for name, value in medians.items()}
    told |= {
        f"{name}_x": round(value / medians["decisions"], 2) for name, value in medians.items() if name != "decisions"
    }
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
