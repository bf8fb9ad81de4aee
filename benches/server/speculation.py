"""Guessing by default beside no guessing, and beside llama.cpp's server: each task on all in turns, answer by answer.

    python -m benches.server.speculation [MODEL] [--rounds 3] [--tasks A,B] [--draft-model NAME]
        [--llama-server PATH [--spec-types A,B]]

Starts `kvloom serve` twice, with its default options and with `--speculate 0`, whose answers must be equal; and a third
time with the draft model, if one is given; and llama.cpp's server, if given, as shipped and once for each of its types
of guesses. Prints one JSON line a task: tokens a second of the answers (medians; the prompt is in the prefix cache) and
the ratios. Texts differ from round to round, and kvloom forgets those of the round before.

A draft model can be made of the model itself, by fewer layers or fewer bits:
`llama-quantize --allow-requantize --prune-layers 9,10,11 MODEL DRAFT.gguf Q4_0`.

  edit    rename a variable in a file of 170 lines, 600 tokens
  json    an object of a schema with ten fields
  agent   ten turns over one file: read, patch, output of a test, patch
  prose   and code: from nothing, 200 tokens each
  again   the prose once more
  many    8 streams of random prompts, 64 tokens each
"""

import argparse
import json
import random
import shlex
import statistics
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx

from kvloom.bench.client import Target
from kvloom.bench.process import ServerProcess, free_port, serve_command
from kvloom.checkpoints.demo_models import find_model

LIMIT_S = 900.0
CONTEXT = 16384  # of llama.cpp's server, tokens
MODEL = "m"
OWN = ("default", "off", "draft_model")
FIELDS = ["name", "kind", "colour", "country", "material", "owner", "purpose", "condition", "origin", "note"]
SCHEMA = {
    "type": "object",
    "properties": {f"lighthouse_{field}": {"type": "string", "maxLength": 60} for field in FIELDS},
    "required": [f"lighthouse_{field}" for field in FIELDS],
    "additionalProperties": False,
}
Body = dict[str, Any]
Answer = tuple[str, int, float]  # text, tokens, seconds
# yields bodies that are asked at once, gets their answers, and returns those that count
Run = Generator[list[Body], list[Answer], list[Answer]]


def file_of(num_lines: int, turn: int) -> str:
    """A Python file, another one in each round."""
    lines = ["import math", ""]
    for i in range((num_lines - 2) // 7):
        lines += [
            f"def area_{i}(radius, height):",
            f'    """Surface number {i} of a cylinder."""',
            f"    base = math.pi * radius ** 2 + {i + 100 * turn}",
            f"    side = 2 * math.pi * radius * height * {i + 1}",
            "    total = 2 * base + side",
            "    return total",
            "",
        ]
    return "\n".join(lines)


def chat(text: str, num_tokens: int, **fields: Any) -> Body:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": num_tokens, "temperature": 0, "seed": 0, **fields}


def ask(url: str, body: Body) -> Answer:
    """The body's answer; its prompt was read before."""
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        client.post("/v1/chat/completions", json={**body, "model": MODEL, "max_tokens": 1}).raise_for_status()
        begun_s = time.perf_counter()
        answer = client.post("/v1/chat/completions", json={**body, "model": MODEL}).raise_for_status().json()
        took_s = time.perf_counter() - begun_s
    return answer["choices"][0]["message"]["content"] or "", answer["usage"]["completion_tokens"], took_s


def ask_all(url: str, bodies: Sequence[Body]) -> list[Answer]:
    """Answers to bodies that are asked at once; each counts its share of the time of all."""
    begun_s = time.perf_counter()
    with ThreadPoolExecutor(len(bodies)) as threads:
        found = list(threads.map(lambda body: ask(url, body), bodies))
    took_s = time.perf_counter() - begun_s
    return found if len(found) == 1 else [(text, count, took_s / len(found)) for text, count, _ in found]


def edit(turn: int) -> Run:
    said = "Write this file again with the name radius replaced by r. Only the code."
    return (yield [chat(f"```python\n{file_of(170, turn)}\n```\n{said}", 600)])


def as_json(turn: int) -> Run:
    form = {"type": "json_schema", "json_schema": {"name": "lighthouse", "strict": True, "schema": SCHEMA}}
    text = f"Describe the lighthouse of {PLACES[turn % len(PLACES)]}. Every field has a few words."
    return (yield [chat(text, 300, response_format=form)])


def agent(turn: int) -> Run:
    """Each answer is a part of the next prompt, as for an agent."""
    messages = [{"role": "user", "content": f"shapes.py:\n```python\n{file_of(60, turn)}\n```\nRepeat area_3 alone."}]
    found: list[Answer] = []
    for i in range(10):
        found += yield [{"messages": list(messages), "max_tokens": 150, "temperature": 0}]
        messages.append({"role": "assistant", "content": found[-1][0]})
        said = f"The test of area_{i} fails: it must double base. Write area_{i} again with this change alone."
        messages.append({"role": "user", "content": said})
    return found


def prose_of(turn: int) -> list[Body]:
    return [chat(f"Tell the story of a lighthouse keeper of {PLACES[turn % len(PLACES)]} who found a letter.", 200)]


def prose(turn: int) -> Run:
    return (yield prose_of(turn))


def again(turn: int) -> Run:
    yield prose_of(turn)
    return (yield prose_of(turn))


def code(turn: int) -> Run:
    kind = ("bounded priority queue", "ring buffer", "trie", "disjoint set")[turn % 4]
    return (yield [chat(f"Write a Python class for a {kind} with tests.", 200)])


def many(turn: int) -> Run:
    draw = random.Random(turn)
    return (yield [chat(" ".join(str(draw.random()) for _ in range(20)), 64, ignore_eos=True) for _ in range(8)])


PLACES = ("Rubjerg", "Eddystone", "Cordouan", "Alexandria")
TASKS: Mapping[str, Callable[[int], Run]] = {
    "edit": edit,
    "json": as_json,
    "agent": agent,
    "prose": prose,
    "code": code,
    "again": again,
    "many": many,
}


def play(task: Callable[[int], Run], turn: int, urls: Mapping[str, str]) -> dict[str, list[Answer]]:
    """The task's answers on each side; the sides answer in turns."""
    runs = {side: task(turn) for side in urls}
    asked = {side: next(run) for side, run in runs.items()}
    found: dict[str, list[Answer]] = {}
    while asked:
        for side, bodies in list(asked.items()):
            try:
                asked[side] = runs[side].send(ask_all(urls[side], bodies))
            except StopIteration as end:
                found[side] = end.value
                del asked[side]
    return found


def rate(answers: Sequence[Answer]) -> float:
    return sum(count for _, count, _ in answers) / sum(took_s for _, _, took_s in answers)


def line(task: str, rates: Mapping[str, Sequence[float]]) -> Body:
    medians = {side: statistics.median(found) for side, found in rates.items()}
    told = {f"{side}_tok_s": round(found, 1) for side, found in medians.items()}
    own = medians.pop("default")
    others = {f"ratio_to_{side}": round(own / found, 2) for side, found in medians.items()}
    return {"bench": "speculation", "task": task, **told, **others}


def commands(
    model: str, draft_model: str | None, llama_server: str | None, spec_types: Sequence[str]
) -> dict[str, tuple[int, list[str]]]:
    """Port and command of each side."""
    sides, port = {}, free_port()
    ours = {"default": [], "off": ["--speculate", "0"]}
    for side, more in (ours | ({"draft_model": ["--draft-model", draft_model]} if draft_model else {})).items():
        sides[side] = port, serve_command(model, port, ["--served-model-name", MODEL, *more])
        port = free_port()
    for spec_type in ("", *spec_types) if llama_server else ():
        options = ["-m", str(find_model(model)), "--host", "127.0.0.1", "--port", str(port), "-c", str(CONTEXT)]
        guesses = ["--spec-type", spec_type] if spec_type else []
        side = f"llama_cpp_{spec_type}" if spec_type else "llama_cpp"
        sides[side] = port, [*shlex.split(llama_server), *options, *guesses]
        port = free_port()
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--draft-model", help="a draft model, which one more kvloom has")
    parser.add_argument("--llama-server", help="llama.cpp's server and further options of it")
    parser.add_argument("--spec-types", default="ngram-mod,ngram-simple,ngram-map-k", help="its types of guesses")
    args = parser.parse_args()
    sides = commands(
        args.model, args.draft_model, args.llama_server, [one for one in args.spec_types.split(",") if one]
    )
    urls = {side: f"http://127.0.0.1:{port}" for side, (port, _) in sides.items()}
    with ExitStack() as stack:
        for side, (_, command) in sides.items():
            server = stack.enter_context(ServerProcess(command))
            server.first_answer_s(Target(urls[side], MODEL), LIMIT_S, [1000] * 16)
        for task in args.tasks.split(","):
            rates: dict[str, list[float]] = {side: [] for side in sides}
            for turn in range(args.rounds):
                own = [side for side in OWN if side in urls]
                for side in own:
                    httpx.post(f"{urls[side]}/reset_prefix_cache", timeout=LIMIT_S).raise_for_status()
                found = play(TASKS[task], turn, urls)
                answers_of = [[text for text, _, _ in found[side]] for side in own]
                assert all(texts == answers_of[0] for texts in answers_of), "guesses changed an answer"
                for side, answers in found.items():
                    rates[side].append(rate(answers))
            print(json.dumps(line(task, rates)), flush=True)


if __name__ == "__main__":
    main()
