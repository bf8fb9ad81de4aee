"""Installs the agents below a folder, runs each through the task, and prints the table of docs/agents.md.

Fetches the model whose vocabulary the scripted one has (1.1 GB), if it is not there; with --real that model answers.
`python -m tests.agents FOLDER [--real] [NAME...]`. Ends with 1 if one does not finish its task.
"""

import json
import subprocess
import sys
from pathlib import Path

from kvloom.checkpoints.demo_models import pull
from tests.agents.agents import AGENTS, VOCABULARY, Agent

_COLUMNS = (
    *("agent", "packages", "API", "turns", "calls right", "tokens computed, turn by turn", "tokens cached"),
    "tokens of answers, in steps",
)
_ALONE = 'ip link set lo up; exec "$@"'  # in a namespace of its own


def install(agent: Agent, folder: Path) -> None:
    """Once: a folder with the packages stays as it is."""
    if (folder / "installed").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    if agent.is_python:
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
        subprocess.run([folder / "venv/bin/pip", "install", "-q", *agent.packages], check=True)
    else:
        subprocess.run(["npm", "install", "--prefix", folder, "--no-audit", "--no-fund", *agent.packages], check=True)
    (folder / "installed").touch()


def line_of(agent: Agent, folder: Path, *options: str) -> tuple[str, bool]:
    """Its line of the table, and whether it finished its task."""
    program = [sys.executable, "-m", "tests.agents.one", agent.name, folder, *options]
    command = ["unshare", "-rn", "sh", "-c", _ALONE, "sh", *program]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        return f"| {agent.name} | {' '.join(agent.packages)} | failed: {done.stderr.splitlines()[-1:]} |", False
    told = json.loads(done.stdout.splitlines()[-1])
    computed, cached = zip(*told["tokens"], strict=True) if told["tokens"] else ((), ())
    steps = [f"{written} in {count}" for written, count in told["steps"] if count]
    numbers = [", ".join(map(str, each)) for each in (computed, cached, steps)]
    calls = f"{told['right']} of {told['wanted']}" + ("" if told["finished"] else ", not finished")
    cells = [agent.name, " ".join(agent.packages), agent.dialect, told["turns"], calls, *numbers]
    return f"| {' | '.join(map(str, cells))} |", told["finished"]


def main(folder: Path, options: list[str], names: list[str]) -> bool:
    """Whether all finished."""
    pull(VOCABULARY)  # the agents run without a network
    print(f"| {' | '.join(_COLUMNS)} |", "| --- " * len(_COLUMNS) + "|", sep="\n", flush=True)
    finished = True
    for agent in AGENTS:
        if not names or agent.name in names:
            place = folder / agent.name.replace(" ", "-")
            install(agent, place)
            line, is_done = line_of(agent, place, *options)
            finished = finished and is_done
            print(line, flush=True)
    return finished


if __name__ == "__main__":
    options = [given for given in sys.argv[2:] if given == "--real"]
    names = [given for given in sys.argv[2:] if given != "--real"]
    sys.exit(not main(Path(sys.argv[1]).resolve(), options, names))
