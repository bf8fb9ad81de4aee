"""The path of an agent's Unix socket: server and clients search the same paths.

EMS_SOCKET, then /dev/shm/ems/ems.sock (spec ems 3), $XDG_RUNTIME_DIR/ems/ems.sock, and /tmp/ems-UID/ems.sock, which is
only used in a folder that this user owns.
"""

import os
import socket
from pathlib import Path

DOCUMENTED_SOCKET = Path("/dev/shm/ems/ems.sock")
_NAME = "ems.sock"
_PROBE_S = 1.0


def own_folder() -> Path:
    """The folder for a user without a runtime directory."""
    return Path(f"/tmp/ems-{os.getuid()}")


def candidates() -> list[Path]:
    """Paths to try, best first; if EMS_SOCKET is set, only that."""
    named = os.environ.get("EMS_SOCKET")
    if named:
        return [Path(named)]
    found = [DOCUMENTED_SOCKET]
    if os.environ.get("XDG_RUNTIME_DIR"):
        found.append(Path(os.environ["XDG_RUNTIME_DIR"]) / "ems" / _NAME)
    return [*found, own_folder() / _NAME]


def find_socket() -> Path | None:
    """The agent's socket; None when there is none. EMS_SOCKET is returned without a check.

    Of several, the first that a process serves: a killed agent leaves its socket behind.
    """
    if os.environ.get("EMS_SOCKET"):
        return candidates()[0]
    found = [path for path in candidates() if _is_there(path)]
    return next(filter(is_served, found), found[0]) if len(found) > 1 else next(iter(found), None)


def is_served(path: Path) -> bool:
    """Whether a process listens there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True


def serving_path() -> Path:
    """Where an agent serves by default: the first of the paths that it may write to."""
    if os.environ.get("EMS_SOCKET"):
        return candidates()[0]
    if os.access(DOCUMENTED_SOCKET.parent, os.W_OK) or (os.getuid() == 0 and not DOCUMENTED_SOCKET.parent.exists()):
        return DOCUMENTED_SOCKET
    return next(path for path in candidates()[1:] if path.parent == own_folder() or os.access(path.parents[1], os.W_OK))


def why_unreachable(path: Path, error: OSError) -> str:
    """What a failed connection to an agent's socket means, and what to do about it."""
    if isinstance(error, PermissionError):
        return f"this user may not connect to {path}; see the agent's --socket-group and --socket-mode"
    if isinstance(error, FileNotFoundError | ConnectionRefusedError):
        return f"nothing serves {path}; start `kvloom pool agent` or set EMS_EMBEDDED=1"
    return f"{path}: {error}"


def _is_there(path: Path) -> bool:
    """Whether there is a trustworthy socket: another user may have made a folder for a group of their own."""
    try:
        return path.exists() and _may_be_trusted(path)
    except PermissionError:
        return False


def _may_be_trusted(path: Path) -> bool:
    """Whether the folder belongs to this user or root: anybody may make one in /tmp."""
    return path.parent != own_folder() or path.parent.stat().st_uid == os.getuid()
