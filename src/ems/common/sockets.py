"""Where an agent's Unix socket is: the same search for who serves it and who connects to it.

EMS_SOCKET, then /dev/shm/ems/ems.sock (spec ems 3), $XDG_RUNTIME_DIR/ems/ems.sock, and /tmp/ems-UID/ems.sock, which is
taken only from a folder of the user's own.
"""

import os
import socket
from pathlib import Path

DOCUMENTED_SOCKET = Path("/dev/shm/ems/ems.sock")
_NAME = "ems.sock"
_PROBE_S = 1.0


def own_folder() -> Path:
    """For a user without a runtime directory."""
    return Path(f"/tmp/ems-{os.getuid()}")


def candidates() -> list[Path]:
    """Where to look, best first; only the one that EMS_SOCKET names if it does."""
    named = os.environ.get("EMS_SOCKET")
    if named:
        return [Path(named)]
    found = [DOCUMENTED_SOCKET]
    if os.environ.get("XDG_RUNTIME_DIR"):
        found.append(Path(os.environ["XDG_RUNTIME_DIR"]) / "ems" / _NAME)
    return [*found, own_folder() / _NAME]


def find_socket() -> Path | None:
    """The agent's socket; None when there is none. What EMS_SOCKET names is taken unseen.

    Of several the first that somebody serves: an agent that was killed leaves its socket behind.
    """
    if os.environ.get("EMS_SOCKET"):
        return candidates()[0]
    found = [path for path in candidates() if _is_there(path)]
    return next(filter(is_served, found), found[0]) if len(found) > 1 else next(iter(found), None)


def is_served(path: Path) -> bool:
    """Whether somebody listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def serving_path() -> Path:
    """Where an agent serves when nobody says: the first of the candidates that is its own to write."""
    if os.environ.get("EMS_SOCKET"):
        return candidates()[0]
    if os.access(DOCUMENTED_SOCKET.parent, os.W_OK) or (os.getuid() == 0 and not DOCUMENTED_SOCKET.parent.exists()):
        return DOCUMENTED_SOCKET
    return next(path for path in candidates()[1:] if path.parent == own_folder() or os.access(path.parents[1], os.W_OK))


def why_unreachable(path: Path, error: OSError) -> str:
    """What a failed connection to an agent's socket means, and what to do."""
    if isinstance(error, PermissionError):
        return f"this user may not connect to {path}; see the agent's --socket-group and --socket-mode"
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return f"nothing serves {path}; start `kvloom pool agent` or set EMS_EMBEDDED=1"
    return f"{path}: {error}"


def _is_there(path: Path) -> bool:
    """Whether this user sees a socket to be trusted there: another user may have a folder for a group of his own."""
    try:
        return path.exists() and _may_be_trusted(path)
    except PermissionError:
        return False


def _may_be_trusted(path: Path) -> bool:
    """Anybody may make a folder in /tmp: that of another user is not ours."""
    return path.parent != own_folder() or path.parent.stat().st_uid == os.getuid()
