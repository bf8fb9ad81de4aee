"""`kvloom pool doctor`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvloom.pool.config import read_option
from kvloom.pool.doctor import check_machine
from kvloom.reading import read_text


def doctor(
    path: Annotated[Path | None, typer.Option("--socket", help="The agent's socket.")] = None,
    access_id: Annotated[str, typer.Option(help="For an agent with keys: who asks.")] = "",
    access_key_file: Annotated[Path | None, typer.Option(help="File whose first line is the access key.")] = None,
) -> None:
    """Check what the pool needs of this machine, and connect as the SDK would. Exit status 1 when it cannot."""
    try:
        key = (
            read_option("--access-key-file", access_key_file, read_text).partition("\n")[0].strip()
            if access_key_file
            else ""
        )
    except ValueError as error:
        typer.echo(f"kvloom pool doctor: {error}", err=True)
        raise typer.Exit(1) from None
    checks, console = check_machine(path, access_id, key), Console()
    for check in checks:
        line = f"MISS {check.name}: {check.problem}" if check.problem else f"ok   {check.name}"
        console.print(line, highlight=False, soft_wrap=True)
    raise typer.Exit(1 if any(check.problem for check in checks) else 0)
