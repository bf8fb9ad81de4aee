"""The command line: `kvloom --help` lists its commands. A command's module is imported when it is asked for."""

import sys
from importlib import import_module
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from kvloom.contract.errors import UserError

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


class _Commands(TyperGroup):
    """Those of _PLACES: a Typer app is a group of commands, a function is one."""

    def list_commands(self, ctx: object) -> list[str]:
        return list(_PLACES)

    def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | TyperGroup | None:
        if cmd_name not in _PLACES:
            return None
        module, _, name = _PLACES[cmd_name].partition(":")
        place = getattr(import_module(module), name)
        if not isinstance(place, typer.Typer):
            function, place = place, typer.Typer(add_completion=False)
            place.command()(function)
        command = typer.main.get_command(place)
        assert isinstance(command, TyperCommand | TyperGroup), "what Typer makes of an app"
        command.name = cmd_name
        return command


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


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
    """Entry point: mistakes of a user are one line and exit code 1."""
    try:
        app()
    except UserError as error:
        print(f"kvloom: {error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
