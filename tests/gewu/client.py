"""A client process for tests: reads one command a line on stdin, prints its results as one JSON line.

$QOS_LIBRARY is the libqos.so to load instead of this package's.
"""

import ctypes
import json
import os
import signal
import sys
import threading
from pathlib import Path

from kvloom.gewu import session
from kvloom.gewu.session import _OnResponse, load_library
from tests.support.waiting import WAIT_S

if "QOS_LIBRARY" in os.environ:
    session.library = lambda: Path(os.environ["QOS_LIBRARY"])
library = load_library()
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: the app ends with its test, also in the middle of a call
replies: dict[int, list[dict]] = {}
arrived = threading.Condition()


@_OnResponse
def on_response(context: int, response: bytes) -> None:
    with arrived:
        replies.setdefault(context, []).append(json.loads(response))
        arrived.notify_all()


def create(attributes: str) -> list[int]:
    result = library.OH_QoS_GewuCreateSession(attributes.encode())
    return [result.error, result.handle]


def submit(handle: int, request: str, context: int) -> list[int]:
    result = library.OH_QoS_GewuSubmitRequest(handle, request.encode(), on_response, context)
    return [result.error, result.handle]


def wait(context: int) -> list[dict]:
    """All replies up to the final one."""
    with arrived:
        arrived.wait_for(lambda: replies.get(context, [{}])[-1].get("finish_reason"), WAIT_S)
        return replies.get(context, [])


def started(context: int) -> bool:
    with arrived:
        return arrived.wait_for(lambda: bool(replies.get(context)), WAIT_S)


def num_replies(context: int) -> int:
    """The number of replies of this context so far."""
    with arrived:
        return len(replies.get(context, []))


def level(value: int) -> int:
    return library.OH_QoS_SetThreadQoS(ctypes.c_int(value))


def patience(limit_ms: int) -> None:
    """Set how long calls wait from now on. Needs a library that was built with tests/abi/patience.h."""
    os.environ["TEST_PATIENCE_MS"] = str(limit_ms)


def abort(handle: int, request: int) -> int:
    return library.OH_QoS_GewuAbortRequest(handle, request)


def destroy(handle: int) -> int:
    return library.OH_QoS_GewuDestroySession(handle)


CALLS = {f.__name__: f for f in (create, submit, wait, started, num_replies, level, patience, abort, destroy)}

for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(CALLS[name](*arguments)), flush=True)
