"""Where an agent's Unix socket is: the same search for who serves it and who connects to it.

EMS_SOCKET, then /dev/shm/ems/ems.sock (spec ems 3), $XDG_RUNTIME_DIR/ems/ems.sock, and /tmp/ems-UID/ems.sock, which is
taken only from a folder of the user's own.
"""

import os
import socket
from pathlib import Path

DOCUMENTED_SOCKET = Path("/dev/shm/ems/ems.sock")
_NAME = "ems.sock"


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
    """The agent's socket; None when there is none. What EMS_SOCKET names is taken unseen."""
    if os.environ.get("EMS_SOCKET"):
        return candidates()[0]
    return next((path for path in candidates() if path.exists() and _may_be_trusted(path)), None)


def is_served(path: Path) -> bool:
    """Whether somebody listens there: an agent that was killed leaves its socket behind."""
    with socket.socket(socket.AF_UNIX) as probe:
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


def _may_be_trusted(path: Path) -> bool:
    """Anybody may make a folder in /tmp: that of another user is not ours."""
    return path.parent != own_folder() or path.parent.stat().st_uid == os.getuid()
