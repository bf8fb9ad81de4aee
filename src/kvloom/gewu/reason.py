"""Why a Create was refused, in words: the C call only returns a code."""

import os
from collections.abc import Mapping
from pathlib import Path

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.modelfiles import open_files
from kvloom.gewu.prober.probe import probe
from kvloom.gewu.service.settings import find_service
from kvloom.gewu.status import ask_status
from kvloom.mistakes import reason_of

_MAX_PATH_BYTES = 107  # sun_path, without its end
_MAX_MODEL = 4095  # characters of a name that may be a path; of a longer one a message has the beginning
_SHOWN_MODEL = 80


def why_refused(code: Code, model: str, environ: Mapping[str, str] = os.environ) -> str:
    """One sentence: what is wrong and, where that helps, what to do."""
    if code is Code.NOSYS and (silence := _silence(environ)):
        return silence
    shown = model if len(model) <= _MAX_MODEL else f"{model[:_SHOWN_MODEL]}..."
    if code is Code.NOMEM:
        return f"there is no memory for {shown}: `kvloom gewu status` shows the budget and who holds it"
    return _wrong_with(model, shown) or f"the session on {shown} was refused; GEWU_LOG=1 says why"


def _silence(environ: Mapping[str, str]) -> str | None:
    path = find_service(environ)
    try:
        ask_status(path)
    except OSError as error:
        return silence_of(path, error)
    return None


def silence_of(path: Path, error: OSError) -> str:
    """Why no service answers, in one sentence with what to do. `error`: of ask_status."""
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        return f"{path} is longer than the {_MAX_PATH_BYTES} bytes of a socket's path: set GEWU_SOCKET to a shorter one"
    return f"no service answers on {path} ({reason_of(error)}): start it with `kvloom gewu daemon`"


def _wrong_with(model: str, shown: str) -> str | None:
    try:
        fd = os.open(model, os.O_RDONLY | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        return f"{shown}: {reason_of(error)}"
    try:
        files = open_files(fd)
    except Refused as refused:
        return str(refused)
    finally:
        os.close(fd)
    try:
        probe(files)
    except Refused as refused:
        return str(refused)
    finally:
        files.close()
    return None
