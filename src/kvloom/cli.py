"""The command line: `kvloom --help` lists its commands. A command's module is imported when it is asked for."""

import sys
from importlib import import_module
from importlib.metadata import version
from typing import Annotated

import typer
from typer.core import TyperCommand, TyperGroup

from kvloom.engine.errors import UserError

_PLACES = {
    "serve": "kvloom.server.cli:serve",
    "chat": "kvloom.server.cli:chat",
    "pull": "kvloom.server.cli:pull",
    "api-key": "kvloom.server.cli:api_key",
    "config": "kvloom.server.config_cli:app",
    "cert": "kvloom.server.cert_cli:app",
    "bench": "kvloom.bench.cli:bench",
    "tune": "kvloom.tuning.cli:tune",
    "simulate": "kvloom.tuning.cli:simulate",
    "dataset": "kvloom.tuning.cli:dataset",
    "pool": "kvloom.pool.cli:app",
    "gewu": "kvloom.gewu.cli:app",
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
        command.name = cmd_name
        return command  # type: ignore[return-value]


app = typer.Typer(cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"kvloom {version('kvloom')}")
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
