"""Guessing by default beside no guessing: two servers of one model, each task in turns, whose answers must be equal.

`python -m benches.server.speculation [MODEL] [--rounds 3] [--peer URL,NAME]` starts `kvloom serve` twice, with its
default options and with `--speculate 0`, and prints one JSON line a task: tokens a second of the answers (medians; the
prompt is in the prefix cache) and the ratio. A peer is an OpenAI server of the same model that is running already.

  edit    rename a variable in a file of 170 lines, 600 tokens
  json    an object of a schema with ten fields
  agent   ten turns over one file: read, patch, output of a test, patch
  prose   and code: from nothing, 200 tokens each
  many    8 streams of random prompts, 64 tokens each
"""

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import httpx

from kvloom.bench.client import Target
from kvloom.bench.process import ServerProcess

PORTS = {"default": 8116, "off": 8117}
LIMIT_S = 900.0
FIELDS = ["name", "kind", "colour", "country", "material", "owner", "purpose", "condition", "origin", "note"]
SCHEMA = {
    "type": "object",
    "properties": {f"lighthouse_{field}": {"type": "string", "maxLength": 60} for field in FIELDS},
    "required": [f"lighthouse_{field}" for field in FIELDS],
    "additionalProperties": False,
}
Body = dict[str, Any]
Answer = tuple[str, int, float]  # text, tokens, seconds


def file_of(num_lines: int) -> str:
    """A Python file."""
    lines = ["import math", ""]
    for i in range((num_lines - 2) // 7):
        lines += [
            f"def area_{i}(radius, height):",
            f'    """Surface number {i} of a cylinder."""',
            f"    base = math.pi * radius ** 2 + {i}",
            f"    side = 2 * math.pi * radius * height * {i + 1}",
            "    total = 2 * base + side",
            "    return total",
            "",
        ]
    return "\n".join(lines)


def chat(text: str, num_tokens: int, **fields: Any) -> Body:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": num_tokens, "temperature": 0, "seed": 0, **fields}


def ask(url: str, name: str, body: Body) -> Answer:
    """The body's answer; its prompt was read before."""
    with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
        client.post("/v1/chat/completions", json={**body, "model": name, "max_tokens": 1}).raise_for_status()
        begun_s = time.perf_counter()
        answer = client.post("/v1/chat/completions", json={**body, "model": name}).raise_for_status().json()
        took_s = time.perf_counter() - begun_s
    return answer["choices"][0]["message"]["content"] or "", answer["usage"]["completion_tokens"], took_s


def one(body: Body) -> Callable[[str, str], list[Answer]]:
    return lambda url, name: [ask(url, name, body)]


def agent(url: str, name: str) -> list[Answer]:
    """Each answer is a part of the next prompt, as for an agent."""
    messages = [{"role": "user", "content": f"Here is shapes.py:\n```python\n{file_of(60)}\n```\nRepeat area_3 alone."}]
    found = []
    for turn in range(10):
        answer = ask(url, name, {"messages": messages, "max_tokens": 150, "temperature": 0})
        found.append(answer)
        messages.append({"role": "assistant", "content": answer[0]})
        said = f"The test of area_{turn} fails: it must double base. Write area_{turn} again with this change alone."
        messages.append({"role": "user", "content": said})
    return found


def many(url: str, name: str) -> list[Answer]:
    """Streams at once: their tokens, and the time of all."""
    draw = random.Random(0)
    bodies = [chat(" ".join(str(draw.random()) for _ in range(20)), 64, ignore_eos=True) for _ in range(8)]
    found: dict[int, Answer] = {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: ask(url, name, bodies[i])})) for i in range(8)]
    begun_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.perf_counter() - begun_s
    return [(found[i][0], found[i][1], took_s / len(found)) for i in range(len(found))]


EDIT = f"```python\n{file_of(170)}\n```\nWrite this file again with the name radius replaced by r. Only the code."
FORMAT = {"type": "json_schema", "json_schema": {"name": "lighthouse", "strict": True, "schema": SCHEMA}}
TASKS: Mapping[str, Callable[[str, str], list[Answer]]] = {
    "edit": one(chat(EDIT, 600)),
    "json": one(chat("Describe a lighthouse. Every field has a few words.", 300, response_format=FORMAT)),
    "agent": agent,
    "prose": one(chat("Tell the story of a lighthouse keeper who found a letter.", 200)),
    "code": one(chat("Write a Python class for a bounded priority queue with tests.", 200)),
    "many": many,
}


def rate(answers: Sequence[Answer]) -> float:
    return sum(count for _, count, _ in answers) / sum(took_s for _, _, took_s in answers)


def line(task: str, rates: Mapping[str, Sequence[float]]) -> Body:
    medians = {side: statistics.median(found) for side, found in rates.items()}
    told = {f"{side}_tok_s": round(found, 1) for side, found in medians.items()}
    own = medians.pop("default")
    others = {f"ratio_to_{side}": round(own / found, 2) for side, found in medians.items()}
    return {"bench": "speculation", "task": task, **told, **others}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="qwen2.5-coder-1.5b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--peer", help="URL,NAME")
    args = parser.parse_args()
    sides = {side: (f"http://127.0.0.1:{port}", "m") for side, port in PORTS.items()}
    with ExitStack() as stack:
        for side, port in PORTS.items():
            more = ["--speculate", "0"] if side == "off" else []
            command = [sys.executable, "-m", "kvloom.cli", "serve", args.model, "--served-model-name", "m", "--port"]
            server = stack.enter_context(ServerProcess([*command, str(port), *more]))
            server.first_answer_s(Target(sides[side][0], "m"), LIMIT_S, [1, 2, 3])
        if args.peer:
            url, _, name = args.peer.partition(",")
            sides["peer"] = url, name
        for task in args.tasks.split(","):
            rates: dict[str, list[float]] = {side: [] for side in sides}
            for _ in range(args.rounds):
                answers = {side: TASKS[task](url, name) for side, (url, name) in sides.items()}
                default, off = ([text for text, _, _ in answers[side]] for side in PORTS)
                assert default == off, "guesses changed an answer"
                for side, found in answers.items():
                    rates[side].append(rate(found))
            print(json.dumps(line(task, rates)), flush=True)


if __name__ == "__main__":
    main()
