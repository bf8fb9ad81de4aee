"""`kvloom config check | init`."""

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from kvloom.contract.errors import BadRequest
from kvloom.server.config.key import Key
from kvloom.server.config.keys import LAYOUT_1
from kvloom.server.config.reading import Mistakes
from kvloom.server.run.launch import notes_of, read_settings
from kvloom.server.run.preflight import problems

_COMMANDS = ("mindieservice_daemon", "llm_engine_test", "seceasy_encrypt")
_SCRIPT = "config_mindie_server_tls_cert.py"


def lay(home: Path) -> None:
    """Lay them in `home`; what is there already stays. Raises OSError."""
    installed = Path(sys.executable).parent
    for command in _COMMANDS:
        link = home / "bin" / command
        if (installed / command).exists() and not link.exists() and not link.is_symlink():
            link.parent.mkdir(mode=0o750, exist_ok=True)
            link.symlink_to(installed / command)
    if (installed / _SCRIPT).exists():
        target = repr(str(installed / _SCRIPT))  # its interpreter knows kvloom; that of `python3 scripts/...` may not
        _write(home / "scripts" / _SCRIPT, f"import os\nimport sys\n\nos.execv({target}, [{target}, *sys.argv[1:]])\n")
    path, root = (shlex.quote(str(each)) for each in (installed, home))
    _write(home / "set_env.sh", f"export PATH={path}:$PATH\nexport MIES_INSTALL_PATH={root}\n")


def _write(path: Path, text: str) -> None:
    if path.exists() or path.is_symlink():
        return
    path.parent.mkdir(mode=0o750, exist_ok=True)
    path.write_text(text)


app = typer.Typer(help="config.json: check one, begin one.", no_args_is_help=True, add_completion=False)
console, errors = Console(), Console(stderr=True)


@app.command()
def check(file: Annotated[Path, typer.Argument(help="A config.json.")]) -> None:
    """Say all that is wrong with a config.json on this machine, as a start would find it, or what it sets up."""
    settings = read_settings(file, os.environ)
    found = list(problems(settings))
    if len(found) > 1:
        raise Mistakes(file, found)
    if found:
        raise found[0]
    for note in notes_of(settings, os.environ):
        errors.print(note, highlight=False, soft_wrap=True)
    config = settings.build()
    names = ", ".join(config.names)
    scheme = "https" if config.tls else "http"
    console.print(f"{file} is right: {names} on {scheme}://{config.host}:{config.port}", highlight=False)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="Where to write it.")] = Path("config.json"),
    force: Annotated[bool, typer.Option(help="Overwrite a file that is there.")] = False,
    https: Annotated[bool, typer.Option("--https", help="Mutual TLS with the files of: kvloom cert dev .")] = False,
) -> None:
    """Write a config.json to begin with, each key with its meaning and range."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if force else os.O_EXCL)
    try:
        file.parent.mkdir(mode=0o750, parents=True, exist_ok=True)
        with os.fdopen(os.open(file, flags, 0o640), "w", encoding="utf-8") as out:
            out.write(starting_point(https))
        if file.parent.name == "conf":
            lay(file.parent.absolute().parent)
    except FileExistsError as error:
        if Path(error.filename) != file:
            raise BadRequest(str(file), f"cannot be written: {error.filename} is no folder") from None
        raise BadRequest(str(file), "is there already; give another name, or --force") from None
    except OSError as error:
        raise BadRequest(str(file), f"cannot be written: {error.strerror}") from None
    console.print(f"wrote {file}; serve it with: kvloom serve --config {file}", highlight=False, soft_wrap=True)


def starting_point(https: bool = False) -> str:
    """A config.json in the first layout, with `//` comments; optional keys are commented out."""
    return "\n".join(_lines(LAYOUT_1, "", https)) + "\n"


def _lines(layout: Mapping[str, Any], indent: str, https: bool) -> Iterator[str]:
    """A JSON object over several lines; the caller adds the comma."""
    yield indent + "{"
    inner = indent + "  "
    shown = [(name, b) for name, b in layout.items() if not isinstance(b, Key) or _value(b, https) is not None]
    for i, (name, below) in enumerate(shown):
        comma = "," if i + 1 < len(shown) else ""
        if isinstance(below, Key):
            yield f"{inner}// {below.meaning}: {below.allowed}"
            yield f"{inner}{json.dumps(name)}: {json.dumps(_value(below, https))}{comma}"
            continue
        is_list = isinstance(below, list)
        first, *rest, last = _lines(below[0] if is_list else below, inner, https)
        yield f"{inner}{json.dumps(name)}: {'[' if is_list else ''}{first.strip()}"
        yield from rest
        yield last + ("]" if is_list else "") + comma
    yield from _optional_lines(layout, inner, https)
    yield indent + "}"


def _optional_lines(layout: Mapping[str, Any], indent: str, https: bool) -> Iterator[str]:
    """A comment for each optional key that is left out, one for each setting."""
    told = {below.setting for below in layout.values() if isinstance(below, Key) and _value(below, https) is not None}
    for name, below in layout.items():
        if isinstance(below, Key) and not below.is_idle and below.setting and below.setting not in told:
            told.add(below.setting)
            value = "" if below.default_https is None else f" = {json.dumps(below.default_https)}"
            yield f"{indent}// {name}{value}, optional; {below.meaning}: {below.allowed}"


def _value(key: Key, https: bool) -> Any:
    """The key's value in the file that `init` writes; None = it is left out."""
    if not https or key.default_https is None:
        return key.default
    return key.default_https
