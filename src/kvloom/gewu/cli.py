"""`kvloom gewu`: the daemon, its status, a prompt from the shell, and the flags to compile against the library."""

import asyncio
import json
import logging
import os
import socket
from pathlib import Path
from typing import Annotated, Any

import typer

from kvloom.engine.errors import BadRequest, ModelError
from kvloom.engine.hub import MODELS, find_model
from kvloom.gewu.build import BuildError, compiler_flags, linker_flags
from kvloom.gewu.codes import Refused
from kvloom.gewu.daemon import run as run_daemon
from kvloom.gewu.frames import Frame, FrameDecoder, encode
from kvloom.gewu.session import Session
from kvloom.gewu.settings import find_service, read_settings

app = typer.Typer(help="On-device inference sessions behind a C ABI.", no_args_is_help=True, add_completion=False)

_STATUS_TIMEOUT_S = 5.0


@app.callback(invoke_without_command=True)
def flags(
    cflags: Annotated[bool, typer.Option("--cflags", help="Print what the compiler needs.")] = False,
    libs: Annotated[bool, typer.Option("--libs", help="Print what the linker needs; builds libqos.so once.")] = False,
) -> None:
    """On-device inference sessions behind a C ABI: $(kvloom gewu --cflags --libs)."""
    try:
        words = [compiler_flags()] * cflags + [linker_flags()] * libs
    except BuildError as error:
        raise SystemExit(str(error)) from None
    if words:
        print(" ".join(words))


@app.command()
def daemon(
    alias: Annotated[list[str], typer.Option(help="FROM=TO: what stands at a model path; repeat as needed.")] = [],  # noqa: B006
    backend: Annotated[str, typer.Option(help="Back end of the engine.")] = "auto",
    verbose: Annotated[bool, typer.Option("--verbose", "-v")] = False,
) -> None:
    """Serve sessions in the foreground, on $GEWU_SOCKET, $XDG_RUNTIME_DIR/gewu.sock or /run/gewu/gewu.sock."""
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s")
    try:
        pairs = dict(_split_alias(text) for text in alias)
        asyncio.run(run_daemon(read_settings(pairs, backend)))
    except (BadRequest, OSError) as error:
        raise SystemExit(f"gewu: {error}") from None


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """What the daemon holds: models, sessions, requests, memory."""
    path = find_service(os.environ)
    try:
        found = ask_status(path)
    except OSError as error:
        why = error.strerror or error
        raise SystemExit(f"gewu: no service answers on {path} ({why}): start it with `kvloom gewu daemon`") from None
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


def ask_status(path: Path) -> dict[str, Any]:
    """The status of the daemon that listens on `path`. Raises OSError when there is none."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_STATUS_TIMEOUT_S)
        sock.connect(str(path))
        sock.sendall(encode(Frame("Q", 1)))
        decoder = FrameDecoder()
        while (frame := decoder.next_frame()) is None:
            data = sock.recv(1 << 16)
            if not data:
                raise ConnectionError("the daemon closed the connection")
            decoder.feed(data)
    found: dict[str, Any] = json.loads(frame.payload)
    return found


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
