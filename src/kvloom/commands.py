"""What commands share: groups whose commands are imported on demand, and a check of options."""

import math
from collections.abc import Mapping
from importlib import import_module

import typer
from typer.core import TyperCommand, TyperGroup


def finite(value: float | None) -> float | None:
    """Callback of options with a range, whose check lets NaN and infinity pass. Raises BadParameter."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be a finite number, got {value:g}")
    return value


def group_of(commands: Mapping[str, str]) -> type[TyperGroup]:
    """`commands`: name of a command -> "module:name". A Typer app is a group of commands, a function is one."""

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
            return command

    return Commands
