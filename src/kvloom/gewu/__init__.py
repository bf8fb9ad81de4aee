"""On-device inference sessions: a C ABI (libqos.so, qos/qos.h), the daemon behind it, and a Python binding."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvloom.gewu.codes import Code, Refused
    from kvloom.gewu.session import Request, Session

__all__ = ["Code", "Refused", "Request", "Session"]

_MODULES = {"Code": "codes", "Refused": "codes", "Request": "session", "Session": "session"}


def __getattr__(name: str) -> Any:
    """Loads the binding on first use: the daemon and its processes, which live in this package too, do not need it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
