"""Traces of requests: this project's JSONL, Mooncake's JSONL and BurstGPT's CSV, recognised by their beginning."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest
from kvloom.engine.schedule.policies import MAX_PRIORITY, MAX_SLO_S
from kvloom.reading import read_text
from kvloom.tuning.machine import Job

MOONCAKE_BLOCK = 512  # tokens of one of its hash ids
_MAX_ID = 2**53  # hash ids are taken modulo this, so that tokens made from them have 64 bits
Count = Annotated[int, Meta(ge=1, le=2**24)]


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request of a trace.

    hash_ids: one for each MOONCAKE_BLOCK tokens of its prompt, the last block partial; prompts with the same first ids
    share these tokens. Without ids the prompt shares no prefix with others.
    """

    arrival_s: Annotated[float, Meta(ge=0)]
    prompt_tokens: Count
    output_tokens: Count
    priority: Annotated[int, Meta(ge=0, le=MAX_PRIORITY)] = 0
    slo_s: Annotated[float, Meta(gt=0)] = MAX_SLO_S
    tenant: str = ""
    hash_ids: tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...] = ()


class _Mooncake(msgspec.Struct):
    """A line of Mooncake's traces. timestamp: ms."""

    timestamp: Annotated[float, Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...] = ()

    def arrival(self) -> Arrival:
        return Arrival(self.timestamp / 1e3, self.input_length, self.output_length, hash_ids=self.hash_ids)


class _BurstGpt(msgspec.Struct):
    """A row of BurstGPT's traces; times in seconds. A failed request has no response tokens."""

    timestamp: Annotated[float, Meta(ge=0)] = msgspec.field(name="Timestamp")
    num_input: Annotated[int, Meta(ge=0, le=2**24)] = msgspec.field(name="Request tokens")
    num_output: Annotated[int, Meta(ge=0, le=2**24)] = msgspec.field(name="Response tokens")


_own_decoder = msgspec.json.Decoder(Arrival)
_mooncake_decoder = msgspec.json.Decoder(_Mooncake)


def read_trace(path: Path, limit: int | None = None) -> list[Arrival]:
    """The first `limit` requests of the file, which may be in any order. Raises BadRequest with file and line."""
    try:
        text = read_text(path)
    except OSError as error:
        raise BadRequest(str(path), f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadRequest(str(path), "is no text: a trace is JSONL or CSV") from None
    is_json = not text.strip() or text.lstrip().startswith(("{", "["))
    rows = _json_rows(path, text) if is_json else _burst_rows(path, text)
    found = [arrival for arrival, _ in zip(rows, range(limit or 2**62), strict=False)]
    if not found:
        raise BadRequest(str(path), "holds no request")
    return found


def servable(trace: Sequence[Arrival], max_seq_len: int) -> tuple[list[Arrival], str]:
    """The requests that fit into an engine of this context, and a note on the others; "" = there are none.

    Raises BadRequest when none fits.
    """
    found = [arrival for arrival in trace if arrival.prompt_tokens < max_seq_len]
    where = "max_seq_len of --times, maxSeqLen of --config, what --num-blocks hold"
    note = (
        f"{len(trace) - len(found)} of {len(trace)} requests have prompts of {max_seq_len} tokens and more, "
        f"the engine's context ({where}): a server refuses them"
    )
    if not found:
        raise BadRequest("trace", note)
    return found, note if len(found) < len(trace) else ""


def job_of(index: int, arrival: Arrival) -> Job:
    """The request as a machine's Job."""
    size = arrival.prompt_tokens
    who = (arrival.priority, arrival.tenant, arrival.slo_s)
    if not arrival.hash_ids:  # its own salt and one repeated token: a prefix that only this request can hit
        return Job(index, [0] * size, arrival.output_tokens, arrival.arrival_s, str(index), *who)
    tokens = [id % _MAX_ID * MOONCAKE_BLOCK + i for id in arrival.hash_ids for i in range(MOONCAKE_BLOCK)][:size]
    tokens += [-1 - index] * (size - len(tokens))
    return Job(index, tokens, arrival.output_tokens, arrival.arrival_s, f"shared {arrival.tenant}", *who)


def _json_rows(path: Path, text: str) -> Iterable[Arrival]:
    is_mooncake: bool | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        if is_mooncake is None:
            if line.lstrip().startswith("["):
                raise BadRequest(f"{path}, line {number}", "is an array: a trace is one object a line (jq -c '.[]')")
            is_mooncake = '"input_length"' in line or '"timestamp"' in line
        try:
            yield _mooncake_decoder.decode(line).arrival() if is_mooncake else _own_decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise BadRequest(f"{path}, line {number}", str(error)) from None


def _burst_rows(path: Path, text: str) -> Iterable[Arrival]:
    rows = csv.DictReader(io.StringIO(text))
    wanted = [field.encode_name for field in msgspec.structs.fields(_BurstGpt)]
    missing = [name for name in wanted if name not in (rows.fieldnames or ())]
    if missing:
        raise BadRequest(f"{path}, line 1", f"is neither JSON nor a header with the column {missing[0]!r}")
    for row in rows:
        try:
            read = msgspec.convert({name: row[name] for name in wanted}, _BurstGpt, strict=False)
        except msgspec.ValidationError as error:
            raise BadRequest(f"{path}, line {rows.line_num}", str(error)) from None
        if read.num_input and read.num_output:
            yield Arrival(read.timestamp, read.num_input, read.num_output)
