"""A client process for tests: reads one command a line on stdin, prints one JSON line of results each."""

import ctypes
import json
import sys
import threading

from kvloom.gewu.session import _OnResponse, load_library

library = load_library()
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


def submit(session: int, request: str, context: int) -> list[int]:
    result = library.OH_QoS_GewuSubmitRequest(session, request.encode(), on_response, context)
    return [result.error, result.handle]


def wait(context: int) -> list[dict]:
    """All replies up to the final one."""
    with arrived:
        arrived.wait_for(lambda: replies.get(context, [{}])[-1].get("finish_reason"), 20)
        return replies.get(context, [])


def started(context: int) -> bool:
    with arrived:
        return arrived.wait_for(lambda: bool(replies.get(context)), 20)


def level(value: int) -> int:
    return library.OH_QoS_SetThreadQoS(ctypes.c_int(value))


def abort(session: int, request: int) -> int:
    return library.OH_QoS_GewuAbortRequest(session, request)


def destroy(session: int) -> int:
    return library.OH_QoS_GewuDestroySession(session)


CALLS = {f.__name__: f for f in (create, submit, wait, started, level, abort, destroy)}

for line in sys.stdin:
    name, *arguments = json.loads(line)
    print(json.dumps(CALLS[name](*arguments)), flush=True)
