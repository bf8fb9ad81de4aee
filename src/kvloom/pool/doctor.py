"""`kvloom pool doctor`: checks what the pool needs of this machine, in the way that the SDK uses it."""

import os
import secrets
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from ems.common.channel import CHANNEL_ERRORS, Channel
from ems.common.sockets import candidates, find_socket, serving_path, why_unreachable
from ems.keys import NONCE_BYTES, proof, same, verifier
from ems.wire import messages as m
from kvloom.pool.storage.segments import SharedMemory

_PROBE_S = 2.0
_ASKS_FOR_KEYS = "the agent asks for keys"


@dataclass(frozen=True, slots=True)
class Check:
    """name: for people; problem: empty = OK."""

    name: str
    problem: str


def check_machine(path: Path | None, access_id: str, access_key: str) -> list[Check]:
    """What an engine lacks that looks for its agent at `path`, or where the SDK looks."""
    socket_path = path or find_socket()
    memory = "" if _can_seal() else "needs Linux 5.1 or later with memfd_create and F_SEAL_FUTURE_WRITE"
    if socket_path is None:
        searched = ", ".join(map(str, candidates()))
        problem = f"this user sees none of {searched}; start `kvloom pool agent` or set EMS_EMBEDDED=1"
        folder = serving_path().parent
        served = "" if _is_writable(folder) else f"{folder} cannot be written; use --socket or XDG_RUNTIME_DIR"
        return [Check("sealed shared memory", memory), Check("socket directory", served), Check("agent", problem)]
    problem = why_not(socket_path, access_id, access_key)
    return [Check("sealed shared memory", memory), Check(f"agent at {socket_path}", problem)]


def why_not(path: Path, access_id: str = "", access_key: str = "") -> str:
    """Why a session cannot be opened at this socket with these credentials; empty = it can."""
    deadline_s = time.monotonic() + _PROBE_S
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_PROBE_S)
        try:
            sock.connect(str(path))
            return _shake_hands(Channel(sock), access_id, access_key, deadline_s)
        except (PermissionError, FileNotFoundError, ConnectionRefusedError) as error:
            return why_unreachable(path, error)
        except CHANNEL_ERRORS as error:
            return f"{path} does not answer as an agent: {error}"


def is_answered(path: Path) -> bool:
    """Whether an agent greets on this socket; needs no key."""
    problem = why_not(path)
    return not problem or _ASKS_FOR_KEYS in problem


def _shake_hands(channel: Channel, access_id: str, access_key: str, deadline_s: float) -> str:
    nonce = secrets.token_bytes(NONCE_BYTES)
    channel.send(m.Hello(access_id, nonce), deadline_s)
    challenge = channel.receive(deadline_s).message
    if not isinstance(challenge, m.Challenge):
        return "it does not greet as an agent"
    secret = verifier(access_key if challenge.salt else "", challenge.salt)
    channel.send(m.Proof(proof(secret, "client", access_id, nonce, challenge.nonce)), deadline_s)
    welcome = channel.receive(deadline_s).message
    if isinstance(welcome, m.Failure):
        return f"{welcome.message}; {_ASKS_FOR_KEYS}: give --access-id and --access-key-file"
    expected = proof(secret, "agent", access_id, nonce, challenge.nonce)
    if not isinstance(welcome, m.Welcome) or not same(welcome.proof, expected):
        return "it does not know the access key"
    return ""


def _can_seal() -> bool:
    try:
        SharedMemory("ems-doctor", 4096, is_sealed=True).close()
    except OSError:
        return False
    return True


def _is_writable(folder: Path) -> bool:
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK)
