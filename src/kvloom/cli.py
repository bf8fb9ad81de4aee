"""The command line: `kvloom --help` lists its commands. A command's module is imported when it is asked for."""

import sys
from importlib import import_module
from typing import Annotated

import typer

from kvloom.commands import group_of
from kvloom.contract.errors import UserError
from kvloom.mistakes import problem_of
from kvloom.streams import open_standard_streams

_PLACES = {
    "serve": "kvloom.server.run.cli:serve",
    "chat": "kvloom.client.cli:chat",
    "pull": "kvloom.server.run.cli:pull",
    "models": "kvloom.machine.cli:models",
    "api-key": "kvloom.server.run.cli:api_key",
    "config": "kvloom.server.run.config_cli:app",
    "cert": "kvloom.server.run.cert_cli:app",
    "bench": "kvloom.bench.cli:bench",
    "tune": "kvloom.tuning.cli:tune",
    "simulate": "kvloom.tuning.cli:simulate",
    "dataset": "kvloom.tuning.cli:dataset",
    "pool": "kvloom.pool.cli:app",
    "fleet": "kvloom.fleet.cli:app",
    "gewu": "kvloom.gewu.cli:app",
    "engine": "kvloom.engine_api.cli:app",
    "cache": "kvloom.machine.cli:cache",
    "doctor": "kvloom.machine.cli:doctor",
}

_HINTS = {  # commands of Ollama, vLLM and others
    "run": "`kvloom serve MODEL` serves a model; `kvloom chat`, in another terminal, talks to it",
    "list": "`kvloom models` lists the models that are here",
    "ls": "`kvloom models` lists the models that are here",
    "ps": "`kvloom doctor` says what this machine has; a server's /v1/models and /metrics say what it serves",
    "stop": "Ctrl-C, or SIGTERM to its process, ends `kvloom serve`; running requests finish",
    "show": "`kvloom models` says what is known of a model",
    "rm": "remove the model's folder in ~/.cache/kvloom/models; `kvloom cache clear` removes packed weights",
    "version": "`kvloom --version` prints it",
    "help": "`kvloom --help`, `kvloom COMMAND --help`",
    "complete": "ask a server's /v1/completions; `kvloom chat` talks to it",
}

app = typer.Typer(
    cls=group_of(_PLACES, _HINTS), no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"kvloom {import_module('importlib.metadata').version('kvloom')}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """kvloom: an LLM inference server, an elastic KV-cache pool, on-device sessions."""


def main() -> None:
    """Entry point: an error of the user's is one line and exit code 1."""
    open_standard_streams()
    try:
        app(prog_name="kvloom")
    except (UserError, OSError) as error:
        problem = problem_of(error)
        if problem is None:
            raise
        print(f"kvloom: {problem}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
