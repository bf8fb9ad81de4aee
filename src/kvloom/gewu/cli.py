"""`kvloom gewu`: the daemon, its status, a prompt from the shell, and the flags to compile against the library."""

import asyncio
import json
import logging
import os
from typing import Annotated, Any

import typer

from kvloom.checkpoints.demo_models import MODELS, find_model
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.gewu.build import LIBRARY
from kvloom.gewu.codes import Refused
from kvloom.gewu.reason import silence_of
from kvloom.gewu.service.daemon import run as run_daemon
from kvloom.gewu.service.settings import find_service, find_socket, read_settings
from kvloom.gewu.session import Session
from kvloom.gewu.status import ask_status
from kvloom.native.build import BuildError
from kvloom.native.commands import DEFAULT_PREFIX, Cflags, Destdir, Libs, Prefix, print_flags, print_installed
from kvloom.native.install import Development

app = typer.Typer(help="On-device inference sessions behind a C ABI.", no_args_is_help=True, add_completion=False)
_FILES = Development(LIBRARY, "qos", "Thread QoS levels and Gewu on-device inference sessions")


@app.callback(invoke_without_command=True)
def flags(cflags: Cflags = False, libs: Libs = False) -> None:
    """On-device inference sessions behind a C ABI: $(kvloom gewu --cflags --libs)."""
    print_flags(_FILES, cflags, libs)


@app.command()
def install(prefix: Prefix = DEFAULT_PREFIX, destdir: Destdir = None) -> None:
    """Install libqos.so, its headers and qos.pc for C and C++ programs."""
    print_installed(_FILES, prefix, destdir)


@app.command()
def daemon(
    alias: Annotated[list[str], typer.Option(help="FROM=TO: what stands at a model path; repeat as needed.")] = [],  # noqa: B006
    backend: Annotated[str, typer.Option(help="auto, cpu, torch, or mock (no weights).")] = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
) -> None:
    """Serve sessions in the foreground, on $GEWU_SOCKET, $XDG_RUNTIME_DIR/gewu.sock or /run/gewu/gewu.sock."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s")
    try:
        pairs = dict(_split_alias(text) for text in alias)
        asyncio.run(run_daemon(read_settings(pairs, backend)))
    except BadRequest as error:
        raise SystemExit(f"gewu: {error}") from None
    except OSError as error:
        why = f"cannot listen there ({error.strerror}): set GEWU_SOCKET to a path of yours" if error.errno else error
        raise SystemExit(f"gewu: {find_socket(os.environ)}: {why}") from None


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """What the daemon holds: models, sessions, requests, memory."""
    path = find_service(os.environ)
    try:
        found = ask_status(path)
    except OSError as error:
        raise SystemExit(f"gewu: {silence_of(path, error)}") from None
    print(json.dumps(found) if as_json else _format_status(found))


@app.command()
def run(
    model: Annotated[str, typer.Argument(help="Path of the model, or the name of a fetched one.")],
    prompt: str,
    system: Annotated[str, typer.Option(help="Instructions of the developer.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Stream the answer to one prompt."""
    messages = [{"role": "developer", "content": system}] if system else []
    options: dict[str, Any] = {} if max_tokens is None else {"max_tokens": max_tokens}
    try:
        with Session(str(find_model(model)) if model in MODELS else model) as session:
            for piece in session.stream([*messages, {"role": "user", "content": prompt}], **options):
                print(piece, end="", flush=True)
    except (Refused, BuildError, ModelError) as error:
        code = f" ({error.code.name})" if isinstance(error, Refused) else ""
        raise SystemExit(f"gewu: {error}{code}") from None
    print()


def _split_alias(text: str) -> tuple[str, str]:
    prefix, separator, target = text.partition("=")
    if not prefix or not separator or not target:
        raise BadRequest("alias", f"must be FROM=TO, got {text!r}")
    return prefix, target


def _format_status(found: dict[str, Any]) -> str:
    memory = found["memory"]
    lines = [
        f"memory  {memory['held_bytes'] >> 20} of {memory['budget_bytes'] >> 20} MiB, "
        f"pressure {memory['pressure']}, {memory['evictions']} evictions"
    ]
    if found["paused"]:
        lines.append(f"paused  below {found['paused']['below']}: {found['paused']['reason'] or 'memory is short'}")
    for model in found["models"]:
        lines.append(
            f"model   {model['path']}: {model['state']}, {model['bytes'] >> 20} MiB, {model['sessions']} sessions, "
            f"{model['loads']} loads"
        )
    for session in found["sessions"]:
        lines.append(
            f"session {session['session']} of process {session['pid']}, qos {session['qos'] or 'of the thread'}, "
            f"{session['kv_bytes'] >> 10} KiB of KV cache"
        )
        lines += [
            f"  request {r['request']}: {r['state']}, {r['qos']}, {r['prompt_tokens']} + {r['output_tokens']} tokens"
            for r in session["requests"]
        ]
    return "\n".join(lines)
