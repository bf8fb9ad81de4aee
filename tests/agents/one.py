"""One agent through the task: `python -m tests.agents.one NAME FOLDER`."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from kvloom.checkpoints.demo_models import pull
from kvloom.engine.text.tokenizer import load_tokenizer
from tests.agents.agents import AGENTS, END, MODEL, PROGRAMS, VOCABULARY, Agent, Place, Step
from tests.support.scripted import Turn, scripted_server

_LIMIT_S = 180.0
_CONTEXT = 131_072  # tokens


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
    agent: Agent, script: Script, turns: Sequence[Turn], place: Place, done: "subprocess.CompletedProcess[str]"
) -> dict[str, object]:
    """The agent's line of the table; raises AssertionError when the task is not done."""
    own = [turn for turn in turns if script.at(turn.prompt) is not None]
    shown = [(own[at + 1].prompt if at + 1 < len(own) else "") for at in range(len(script.steps))]
    right = sum(wanted in prompt for (_, wanted), prompt in zip(script.steps, shown, strict=True))
    line = {
        "agent": agent.name, "packages": agent.packages, "dialect": agent.dialect, "turns": len(own), "right": right,
        "wanted": len(script.steps), "tokens": [(turn.num_tokens - turn.num_cached, turn.num_cached) for turn in own],
        "edited": (place.work / "notes.txt").read_text(), "said": END in done.stdout, "code": done.returncode,
    }  # fmt: skip
    line["finished"] = line["edited"] == "the dog sleeps\n" and bool(line["said"]) and right == len(script.steps)
    return line


def run(agent: Agent, folder: Path) -> dict[str, object]:
    """`folder`: with the agent's packages; the rest of it is made anew."""
    home, work = folder / "home", folder / "work"
    for made in (home, work):
        shutil.rmtree(made, ignore_errors=True)
        made.mkdir(parents=True)
    (work / "notes.txt").write_text("the cat sleeps\n")
    script = Script(agent)
    tokenizer = load_tokenizer(pull(VOCABULARY))
    with scripted_server(tokenizer, script, _CONTEXT, names=(MODEL,), max_body_bytes=1 << 24) as (server, turns):
        bin = folder / ("venv/bin" if agent.is_python else "node_modules/.bin")
        place = Place(bin, home, work, server.url)
        script.steps = agent.steps(place)
        for name, text in agent.files(place).items():
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).write_text(text)
        for program in PROGRAMS.glob("*.mjs"):
            shutil.copy(program, folder)
        environment = {"PATH": os.environ["PATH"], "HOME": str(home), "LANG": "C.UTF-8", **agent.environment(place)}
        done = subprocess.run(
            agent.command(place), cwd=work, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_LIMIT_S, check=False,
        )  # fmt: skip
        (folder / "output.txt").write_text(done.stdout + "\n--- errors\n" + done.stderr)
        return told(agent, script, turns.items, place, done)


if __name__ == "__main__":
    [chosen] = [agent for agent in AGENTS if agent.name == sys.argv[1]]
    print(json.dumps(run(chosen, Path(sys.argv[2]).resolve())))
