"""`kvloom pool agent`."""

from functools import wraps
from typing import Any

import typer

from kvloom.mistakes import problem_of
from kvloom.net.tlsconfig import TlsError
from kvloom.pool.agent import serve
from kvloom.pool.options import parse
from kvloom.pool.stores.engine import EngineError


@wraps(parse)
def agent(**given: Any) -> None:
    try:
        serve(parse(**given))
    except (OSError, ValueError, EngineError, TlsError) as error:
        typer.echo(f"kvloom pool agent: {problem_of(error) or error}", err=True)
        raise typer.Exit(1) from None
