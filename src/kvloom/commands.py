"""What commands share: groups whose commands are imported on demand, and a check of options."""

import math
import shutil
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from kvloom.contract.errors import UserError

_REST_COLUMNS = 50  # of a table of options: frame, type and help
_NONE: Mapping[str, str] = {}


def finite(value: float | None) -> float | None:
    """Callback of options with a range, whose check lets NaN and infinity pass. Raises BadParameter."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be a finite number, got {value:g}")
    return value


def group_of(commands: Mapping[str, str], hints: Mapping[str, str] = _NONE) -> type[TyperGroup]:
    """`commands`: name of a command -> "module:name". A Typer app is a group of commands, a function is one.

    `hints`: what to do instead, for commands that other programs have.
    """

    class Commands(TyperGroup):
        def list_commands(self, ctx: object) -> list[str]:
            return list(commands)

        def get_command(self, ctx: object, cmd_name: str) -> TyperCommand | TyperGroup | None:
            if cmd_name not in commands:
                return None
            module, _, name = commands[cmd_name].partition(":")
            found = getattr(import_module(module), name)
            if not isinstance(found, typer.Typer):
                function, found = found, typer.Typer(add_completion=False)
                found.command()(function)
            command = typer.main.get_command(found)
            assert isinstance(command, TyperCommand | TyperGroup), "what Typer makes of an app"
            command.name = cmd_name
            if _cuts_names(command):
                command.rich_markup_mode = None  # a plain page, which wraps
            return command

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            if args and args[0] in hints and args[0] not in commands:
                raise UserError(f"there is no command {args[0]}: {hints[args[0]]}")
            return super().resolve_command(ctx, args)

    return Commands


def _cuts_names(command: TyperCommand | TyperGroup) -> bool:
    """Whether a table of its options would cut their names: one of them is long, and the terminal narrow."""
    longest = max((len(name) for option in command.params for name in option.opts), default=0)
    negations = max((len(name) for option in command.params for name in option.secondary_opts), default=0)
    return longest + negations + _REST_COLUMNS > shutil.get_terminal_size().columns
