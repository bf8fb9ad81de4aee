"""Session: the C ABI from Python, through the same libqos.so that apps use."""

import ctypes
import functools
import itertools
import queue
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from types import TracebackType
from typing import Any, cast

import msgspec

from kvloom.gewu.build import library
from kvloom.gewu.codes import Code, Refused

Messages = Sequence[Mapping[str, str]]
OnReply = Callable[[dict[str, Any]], None]
_Replies = queue.SimpleQueue[dict[str, Any] | None]  # None = the session was closed
_SHOWN_TEXT = 80  # characters


class _Result(ctypes.Structure):
    """OH_QoS_GewuCreateSessionResult and OH_QoS_GewuSubmitRequestResult have the same layout."""

    _fields_ = (("handle", ctypes.c_uint), ("error", ctypes.c_int))


_OnResponse = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_char_p)


@functools.cache
def load_library() -> ctypes.CDLL:
    """libqos.so with its prototypes."""
    loaded = ctypes.CDLL(str(library()))
    loaded.OH_QoS_GewuCreateSession.argtypes = [ctypes.c_char_p]
    loaded.OH_QoS_GewuCreateSession.restype = _Result
    loaded.OH_QoS_GewuSubmitRequest.argtypes = [ctypes.c_uint, ctypes.c_char_p, _OnResponse, ctypes.c_void_p]
    loaded.OH_QoS_GewuSubmitRequest.restype = _Result
    loaded.OH_QoS_GewuAbortRequest.argtypes = [ctypes.c_uint, ctypes.c_uint]
    loaded.OH_QoS_GewuDestroySession.argtypes = [ctypes.c_uint]
    return loaded


_callbacks: dict[int, tuple[int, OnReply]] = {}  # context -> session, callback; the C side only has the number
_contexts = itertools.count(1)


def _dispatch(context: int, response: bytes) -> None:
    """Called on a thread of the library."""
    reply = msgspec.json.decode(response)
    found = _callbacks.get(context) if reply["finish_reason"] is None else _callbacks.pop(context, None)
    if found is not None:
        found[1](reply)


_on_response = _OnResponse(_dispatch)


class Request:
    """A request that was accepted."""

    def __init__(self, session: int, handle: int, context: int) -> None:
        self._session = session
        self.handle = handle
        self._context = context

    def abort(self) -> None:
        """End the request; no reply follows. Raises Refused (NOENT) when it was aborted before."""
        code = Code(load_library().OH_QoS_GewuAbortRequest(self._session, self.handle))
        _callbacks.pop(self._context, None)
        if code is not Code.OK:
            raise Refused(code, "the request cannot be aborted")


def _json(fields: dict[str, object]) -> bytes:
    """Raises Refused (INVAL) for a text that is not Unicode, as of a command line's bytes."""
    try:
        return msgspec.json.encode(fields)
    except UnicodeEncodeError as error:
        raise Refused(Code.INVAL, f"{error.object[:_SHOWN_TEXT]!r} is not UTF-8") from None


class Session:
    """A session on a model; `with` destroys it. Attributes: qos, eval_settings, keep_alive_s (docs/gewu.md).

    Raises Refused with the code that the C call returned.
    """

    def __init__(self, model: str, **attributes: object) -> None:
        text = _json({"model": model, **attributes})
        result = load_library().OH_QoS_GewuCreateSession(text)
        if result.error:
            code = Code(result.error)
            reason = import_module("kvloom.gewu.reason")  # it imports much of the service
            raise Refused(code, reason.why_refused(code, model))
        self.handle: int = result.handle
        self._streams: set[_Replies] = set()

    def __enter__(self) -> "Session":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def submit(self, messages: Messages, on_reply: OnReply, *, stream: bool = True, **options: object) -> Request:
        """`on_reply` gets each reply on a thread of the library; the last one has a finish_reason."""
        context = next(_contexts)
        text = _json({"messages": messages, "stream": stream, **options})
        _callbacks[context] = (self.handle, on_reply)
        result = load_library().OH_QoS_GewuSubmitRequest(self.handle, text, _on_response, context)
        if result.error:
            _callbacks.pop(context, None)
            raise Refused(Code(result.error), "the request was refused; GEWU_LOG=1 says why")
        return Request(self.handle, result.handle, context)

    def stream(self, messages: Messages, *, stream: bool = True, **options: object) -> Iterator[str]:
        """Pieces of the answer, one when `stream` is false. Leaving the loop early aborts.

        Raises Refused when the service fails or the session is closed meanwhile.
        """
        replies: _Replies = queue.SimpleQueue()
        self._streams.add(replies)
        request: Request | None = None
        is_finished = False
        try:
            request = self.submit(messages, replies.put, stream=stream, **options)
            while not is_finished:
                reply = replies.get()
                if reply is None:
                    raise Refused(Code.NOENT, "the session was closed")
                is_finished = reply["finish_reason"] is not None
                if "error" in reply:
                    raise Refused(Code(reply["error"]["code"]), reply["error"]["message"])
                yield cast(str, reply["message"]["content"])
        finally:
            self._streams.discard(replies)
            if request is not None and not is_finished:
                with suppress(Refused):  # it has ended with its session or its service
                    request.abort()

    def ask(self, messages: Messages, **options: object) -> str:
        """The whole answer."""
        return "".join(self.stream(messages, stream=False, **options))

    def close(self) -> None:
        """Destroy the session: its streams end with Refused, its other requests without a reply. A second call does
        nothing.
        """
        load_library().OH_QoS_GewuDestroySession(self.handle)
        for context, (session, _) in list(_callbacks.items()):
            if session == self.handle:
                _callbacks.pop(context, None)
        for replies in tuple(self._streams):
            replies.put(None)
