"""`kvloom config check | init`."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvloom.engine.errors import BadRequest
from kvloom.server.auth import check_bind
from kvloom.server.config import Settings, load_settings
from kvloom.server.config_keys import LAYOUT_1, Key

app = typer.Typer(help="config.json: check one, begin one.", no_args_is_help=True, add_completion=False)
console = Console()


@app.command()
def check(file: Annotated[Path, typer.Argument(help="A config.json.")]) -> None:
    """Say what is wrong with a config.json, or what it sets up. Nothing is started."""
    settings = Settings(load_settings(file))
    config = settings.build()
    check_bind(config.host, config.allows_all_addresses)
    names = ", ".join(card.name for card in config.models)
    scheme = "https" if config.tls else "http"
    console.print(f"{file} is right: {names} on {scheme}://{config.host}:{config.port}", highlight=False)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("config.json"),
    force: Annotated[bool, typer.Option(help="Overwrite a file that is there.")] = False,
) -> None:
    """Write a config.json to begin with, each key with its meaning and range."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        with os.fdopen(os.open(file, flags, 0o640), "w", encoding="utf-8") as out:
            out.write(starting_point())
    except FileExistsError:
        raise BadRequest(str(file), "is there already; give another name, or --force") from None
    except OSError as error:
        raise BadRequest(str(file), f"cannot be written: {error.strerror}") from None
    console.print(f"wrote {file}; serve it with: kvloom serve --config {file}", highlight=False, soft_wrap=True)


def starting_point() -> str:
    """config.json in the first layout, with `//` comments; keys without a default are left out."""
    return "\n".join(_lines(LAYOUT_1, "")) + "\n"


def _lines(layout: dict[str, Any] | Any, indent: str) -> Iterator[str]:
    """A JSON object over several lines; the caller puts the comma."""
    yield indent + "{"
    inner = indent + "  "
    shown = [(name, below) for name, below in layout.items() if not isinstance(below, Key) or below.default is not None]
    for i, (name, below) in enumerate(shown):
        comma = "," if i + 1 < len(shown) else ""
        if isinstance(below, Key):
            yield f"{inner}// {below.meaning}: {below.allowed}"
            yield f"{inner}{json.dumps(name)}: {json.dumps(below.default)}{comma}"
            continue
        is_list = isinstance(below, list)
        first, *rest, last = _lines(below[0] if is_list else below, inner)
        yield f"{inner}{json.dumps(name)}: {'[' if is_list else ''}{first.strip()}"
        yield from rest
        yield last + ("]" if is_list else "") + comma
    yield indent + "}"
