"""On-device inference sessions: a C ABI (libqos.so, qos/qos.h), the daemon behind it, and a Python binding."""

from kvloom.gewu.codes import Code, Refused
from kvloom.gewu.session import Request, Session

__all__ = ["Code", "Refused", "Request", "Session"]
