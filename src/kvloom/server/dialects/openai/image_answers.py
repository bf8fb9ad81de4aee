"""Answers of /v1/images/generations: one body, or events, with a picture's progress as comments between them."""

import base64
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

import msgspec

from kvloom.contract.errors import ServingError
from kvloom.images.messages import Ended, Paint, Picture, Progress, Report
from kvloom.server.errors import openai_error
from kvloom.server.http import sse
from kvloom.server.http.formatting import formatted
from kvloom.server.http.reply import Reply
from kvloom.server.http.streaming import last_frame

_EVENT = "image_generation"


class PicturesWriter:
    """Writes one answer from the reports of its order: a stream is `add` of each, a whole answer `fold` and `whole`."""

    def __init__(self, order: Paint, quality: str, created: int) -> None:
        self._order, self._created = order, created
        self._common: dict[str, Any] = {
            "size": f"{order.width}x{order.height}",
            "quality": quality,
            "background": "opaque",
            "output_format": order.format,
        }
        self._pictures: list[bytes] = []
        self._num_prompt_tokens = 0

    def fold(self, report: Report) -> None:
        """Take one more report into the whole answer."""
        if isinstance(report, Picture) and report.partial is None:
            self._pictures.append(report.data)
        elif isinstance(report, Ended):
            self._num_prompt_tokens = report.num_prompt_tokens

    def whole(self) -> Reply:
        data = [self._entry(i, picture) for i, picture in enumerate(self._pictures)]
        usage = _usage(self._num_prompt_tokens)
        return Reply(msgspec.json.encode({"created": self._created, "data": data, **self._common, "usage": usage}))

    def add(self, report: Report) -> bytes:
        """The frames for one report. A picture is sent when it is complete, with the usage of the request."""
        if isinstance(report, Progress):
            return b": step %d of %d\n\n" % (report.step, report.num_steps)
        if isinstance(report, Ended):
            return sse.DONE
        event = {
            "created_at": self._created,
            "index": report.picture,
            **self._common,
            **self._entry(report.picture, report.data),
        }
        if report.partial is None:
            return _event(f"{_EVENT}.completed", event | {"usage": _usage(report.num_prompt_tokens)})
        return _event(f"{_EVENT}.partial_image", event | {"partial_image_index": report.partial})

    def error(self, error: ServingError) -> bytes:
        return sse.named_event("error", msgspec.json.encode(openai_error(error)))

    def _entry(self, index: int, data: bytes) -> dict[str, Any]:
        """One picture; its seed makes it again."""
        return {"b64_json": base64.b64encode(data).decode(), "seed": self._order.seeds[index]}


async def frames_of(reports: AsyncGenerator[Report], writer: PicturesWriter) -> AsyncGenerator[bytes]:
    """The answer as it comes. An error before the first frame raises; a later one becomes the stream's end."""
    has_begun = False
    try:
        async with aclosing(reports):
            async for report in reports:
                num_bytes = len(report.data) if isinstance(report, Picture) else 0
                frame = await formatted(num_bytes // 100, partial(writer.add, report))
                has_begun = True
                yield frame
    except Exception as problem:  # whatever it is, the client gets an error
        yield last_frame(problem, has_begun, writer.error)


def _event(name: str, fields: dict[str, Any]) -> bytes:
    return sse.named_event(name, msgspec.json.encode({"type": name, **fields}))


def _usage(num_prompt_tokens: int) -> dict[str, Any]:
    """Pictures are made of no tokens."""
    details = {"text_tokens": num_prompt_tokens, "image_tokens": 0}
    tokens = {"input_tokens": num_prompt_tokens, "output_tokens": 0, "total_tokens": num_prompt_tokens}
    return {**tokens, "input_tokens_details": details}
