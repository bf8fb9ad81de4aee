"""Writes `ems/native/messages.hpp`: the messages that C++ speaks, one struct each, from their rows in Python."""

import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from ems.wire.messages import MAX_BLOCK_BYTES, MAX_KEYS, MESSAGES, Message, Request

HEADER = Path(__file__).parents[1] / "src/ems/native/messages.hpp"
_HEAD = f"""\
// Messages, from their rows in ems/wire/messages.py; `make golden` writes this file. Bytes are not copied: they lie in
// the frame that was read, or where the writer has them. Each is as Python has it, but not checked.
#pragma once

#include "wire.hpp"

namespace ems {{

constexpr int64_t kMaxKeys = {MAX_KEYS};  // per frame
constexpr int64_t kMaxBlockBytes = {MAX_BLOCK_BYTES};
"""
_KINDS: dict[Any, tuple[str, str]] = {  # type, and the method that reads and writes it
    int: ("int64_t", "integer"),
    bool: ("bool", "boolean"),
    bytes: ("Bytes", "bytes"),
    list[int]: ("std::vector<int64_t>", "integers"),
}


def header() -> str:
    """The file's text."""
    requests = [cls for cls in MESSAGES.values() if cls.IS_NATIVE]
    answers = [cls.ANSWER for cls in requests if issubclass(cls, Request)]
    spoken = sorted({*requests, *answers}, key=lambda cls: (cls in requests, cls.OP))
    served = " ".join(f"each({cls.__name__})" for cls in sorted(requests, key=lambda cls: cls.OP))
    macro = f"// The requests that the agent answers in C++.\n#define EMS_NATIVE_REQUESTS(each) \\\n    {served}\n"
    return "\n".join([_HEAD, *map(_struct, spoken), macro, "}  // namespace ems\n"])


def _struct(cls: type[Message]) -> str:
    known: tuple[Field[Any], ...] = fields(cls)  # type: ignore[arg-type]
    num_required = sum(field.default is MISSING for field in known)
    lines = [f"    static constexpr uint8_t kOp = {cls.OP}, kNumValues = {len(known)}, kNumRequired = {num_required};"]
    if issubclass(cls, Request):
        lines.append(f"    using Answer = {cls.ANSWER.__name__};")
    lines += [f"    {_KINDS[field.type][0]} {field.name}{_default(field)};" for field in known]
    lines += _method("void read(BodyReader& body)", [f"body.{_read(field)};" for field in known])
    writes = [f"frame.{_KINDS[field.type][1]}({field.name});" for field in known]
    lines += _method("void write(FrameWriter& frame) const", writes)
    return "\n".join([f"struct {cls.__name__} {{", *lines, "};", ""])


def _method(head: str, statements: list[str]) -> list[str]:
    if not statements:
        return [f"    {re.sub('& [a-z]+', '&', head)} {{}}"]
    return [f"    {head} {{", *(f"        {each}" for each in statements), "    }"]


def _literal(field: "Field[Any]") -> str:
    value = int(field.default) if field.default is not MISSING else 0
    return ("false", "true")[value] if field.type is bool else str(value)


def _default(field: "Field[Any]") -> str:
    if field.type not in (int, bool):
        return ""
    return f" = {_literal(field)}"


def _read(field: "Field[Any]") -> str:
    method = _KINDS[field.type][1]
    has_literal = field.type in (int, bool) and field.default not in (MISSING, 0)
    return f"{method}({field.name}{f', {_literal(field)}' if has_literal else ''})"


def write() -> None:
    """Write the file."""
    HEADER.write_text(header())
