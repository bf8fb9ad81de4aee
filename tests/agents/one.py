"""One agent through the task: `python -m tests.agents.one NAME FOLDER [--real]`."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from kvloom.checkpoints.demo_models import pull
from kvloom.engine.text.tokenizer import load_tokenizer
from tests.agents.agents import AGENTS, MODEL, PROGRAMS, VOCABULARY, Agent, Place, Step
from tests.support.scripted import Turn, scripted_server
from tests.support.traced import traced_server

_LIMIT_S, _REAL_LIMIT_S = 180.0, 1500.0
_CONTEXT, _REAL_CONTEXT = 131_072, 32_768  # tokens
_MAX_BODY = 1 << 24
# Guesses pay by the time that steps take. Those of the scripted model take as long as a small model's, in proportion.
_STEP_S, _TOKEN_S = 0.01, 0.001
_COUNT = "3 words"  # what the agent must say


class Script:
    """Answers the steps one after the other, by the number of results in the prompt; a prompt without tools, as for the
    title of a conversation, is answered by a title.
    """

    def __init__(self, agent: Agent) -> None:
        self.steps: Sequence[Step] = ()
        self._agent = agent

    def __call__(self, prompt: str) -> str:
        at = self.at(prompt)
        return "Notes" if at is None else (*(said for said, _ in self.steps), self._agent.end)[min(at, len(self.steps))]

    def at(self, prompt: str) -> int | None:
        """The number of the step; None beside the task."""
        if self._agent.name == "aider":
            return int(self.steps[0][1] in prompt)
        return prompt.count(self._agent.mark) if "<tools>" in prompt else None


def told(
    agent: Agent, steps: Sequence[Step], own: Sequence[Turn], place: Place, done: "subprocess.CompletedProcess[str]"
) -> dict[str, object]:
    """The agent's line of the table. `own`: the turns of the task."""
    right = sum(any(wanted in turn.prompt for turn in own[at + 1 :]) for at, (_, wanted) in enumerate(steps))
    line = {
        "agent": agent.name, "packages": agent.packages, "dialect": agent.dialect, "turns": len(own), "right": right,
        "wanted": len(steps), "tokens": [(turn.num_tokens - turn.num_cached, turn.num_cached) for turn in own],
        "steps": [(turn.num_written, turn.num_steps) for turn in own],
        "edited": (place.work / "notes.txt").read_text(), "said": _COUNT in done.stdout, "code": done.returncode,
    }  # fmt: skip
    line["finished"] = line["edited"] == "the dog sleeps\n" and bool(line["said"]) and right == len(steps)
    return line


@contextmanager
def scripted(agent: Agent, place: Place) -> Iterator[tuple[Place, Callable[[], Sequence[Turn]]]]:
    """The place with the server's address, and the turns of the task so far."""
    script = Script(agent)
    tokenizer = load_tokenizer(pull(VOCABULARY))
    shared = {"names": (MODEL,), "max_body_bytes": _MAX_BODY, "num_speculative_tokens": -1}
    with scripted_server(tokenizer, script, _CONTEXT, _TOKEN_S, step_s=_STEP_S, **shared) as (server, turns):
        place = replace(place, url=server.url)
        script.steps = agent.steps(place)
        yield place, lambda: [turn for turn in turns.items if script.at(turn.prompt) is not None]


@contextmanager
def real(agent: Agent, place: Place) -> Iterator[tuple[Place, Callable[[], Sequence[Turn]]]]:
    """As `scripted`, of the real model."""
    with traced_server(pull(VOCABULARY), _REAL_CONTEXT, names=(MODEL,), max_body_bytes=_MAX_BODY) as (server, turns):
        yield replace(place, url=server.url), lambda: [turn for turn in turns.items if '"tools"' in turn.prompt]


def run(agent: Agent, folder: Path, is_real: bool) -> dict[str, object]:
    """`folder`: with the agent's packages; the rest of it is made anew."""
    home, work = folder / "home", folder / "work"
    for made in (home, work):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
    (work / "notes.txt").write_text("the cat sleeps\n")
    bin = folder / ("venv/bin" if agent.is_python else "node_modules/.bin")
    with (real if is_real else scripted)(agent, Place(bin, home, work, "")) as (place, turns):
        for name, text in agent.files(place).items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text)
        for program in PROGRAMS.glob("*.mjs"):
            shutil.copy(program, folder)
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **agent.environment(place)}
        done = subprocess.run(
            agent.command(place), cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_REAL_LIMIT_S if is_real else _LIMIT_S, check=False,
        )  # fmt: skip
        (folder / "output.txt").write_text(done.stdout + "\n--- errors\n" + done.stderr)
        (folder / "turns.txt").write_text("\n\n".join(turn.prompt for turn in turns()))
        return told(agent, agent.steps(place), turns(), place, done)


if __name__ == "__main__":
    [chosen] = [agent for agent in AGENTS if agent.name == sys.argv[1]]
    print(json.dumps(run(chosen, Path(sys.argv[2]).resolve(), "--real" in sys.argv[3:])))
