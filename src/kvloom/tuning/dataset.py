"""Data sets: CSV rows of token ids for `llm_engine_test` (spec 3.4.3), made from JSONL, CSV or parquet (spec A.2)."""

import csv
import importlib
import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom.contract.errors import BadRequest
from kvloom.contract.numbers import whole
from kvloom.mistakes import reason_of
from kvloom.reading import open_file

FIRST_TOKEN = 1  # the first token of every row in the documented format
MAX_ROW_TOKENS = 2048
FORMATS = (".jsonl", ".csv", ".parquet")
csv.field_size_limit(10 * 2**20)

Progress = Callable[[int], object]  # rows so far


def read_rows(path: Path, vocab_size: int | None = None) -> list[list[int]]:
    """Token ids, one row for each prompt; empty lines are skipped. Raises BadRequest with file and line."""
    rows: list[list[int]] = []
    try:
        with io.TextIOWrapper(open_file(path), newline="", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    rows.append(_row(line, f"{path}, line {number}", vocab_size))
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(str(path), f"cannot be read: {reason_of(error)}") from None
    if not rows:
        raise BadRequest(str(path), "holds no row of token ids")
    return rows


def _row(line: str, where: str, vocab_size: int | None) -> list[int]:
    values = [value.strip() for value in line.split(",")]
    if any(whole(value.removeprefix("-")) is None for value in values):
        raise BadRequest(where, "must be token ids with commas between them, none at the end")
    ids = [int(value) for value in values]
    bad = next((id for id in ids if id < 0 or (vocab_size is not None and id >= vocab_size)), None)
    if bad is not None:
        limit = "" if vocab_size is None else f" below {vocab_size}, the size of the vocabulary"
        raise BadRequest(where, f"token ids must be from 0 on{limit}, got {bad}")
    return ids


def write_rows(path: Path, rows: Sequence[Sequence[int]]) -> None:
    """Write the CSV that `read_rows` reads."""
    with path.open("w", newline="", encoding="utf-8") as out:
        csv.writer(out, lineterminator="\n").writerows(rows)


def read_texts(source: Path, field: str = "text", where: Sequence[str] = ()) -> Iterator[str]:
    """The texts of a file, or of all such files in a folder by name. Raises BadRequest.

    JSONL: `field` of each object (or the line itself if it is a JSON string); CSV, with a header, and parquet: that
    column. `where`: "name=value" conditions on other fields, all of which must hold.
    """
    conditions = dict(_condition(text) for text in where)
    files = sorted(p for p in source.iterdir() if p.suffix in FORMATS) if source.is_dir() else [source]
    if not files:
        raise BadRequest(str(source), f"holds no {', '.join(FORMATS)} file")
    for path in files:
        for number, record in enumerate(_records(path), 1):
            if isinstance(record, str):
                record = {field: record}
            if any(str(record.get(name)) != value for name, value in conditions.items()):
                continue
            if not isinstance(record.get(field), str):
                names = ", ".join(map(str, record)) or "none"
                raise BadRequest(f"{path}, record {number}", f"has no text {field!r}; its fields are: {names}")
            yield record[field]


def _condition(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise BadRequest("where", f"must be name=value, got {text!r}")
    return name, value


def _records(path: Path) -> Iterator[Any]:
    if path.suffix not in FORMATS:
        raise BadRequest(str(path), f"must end with {', '.join(FORMATS)}")
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
            return
        with io.TextIOWrapper(open_file(path), newline="", encoding="utf-8") as lines:
            if path.suffix == ".csv":
                yield from csv.DictReader(lines)
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _json_record(line, path, number)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadRequest(str(path), f"cannot be read: {reason_of(error)}") from None


def _json_record(line: str, path: Path, number: int) -> Any:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{path}, line {number}", f"is not JSON: {error}") from None
    if not isinstance(record, dict | str):
        raise BadRequest(f"{path}, line {number}", "must be an object or a text")
    return record


def _parquet(path: Path) -> Iterator[Any]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise BadRequest(str(path), "parquet files need pyarrow: pip install 'kvloom[parquet]'") from None
    try:
        with open_file(path) as file:
            for batch in parquet.ParquetFile(file).iter_batches(1024):
                yield from batch.to_pylist()
    except (OSError, ValueError, RuntimeError) as error:  # base classes of pyarrow's errors
        raise BadRequest(str(path), f"is damaged, or no parquet file: {reason_of(error)}") from None


@dataclass(frozen=True, slots=True)
class RowRules:
    """Rules for rows."""

    max_tokens: int = MAX_ROW_TOKENS  # longer rows are truncated
    begin_with: int | None = None  # a token put before rows that lack it
    limit: int | None = None  # most rows


def convert(
    texts: Iterator[str], encode: Callable[[str], list[int]], rules: RowRules, progress: Progress = lambda count: None
) -> list[list[int]]:
    """Rows of token ids; texts without tokens are left out."""
    rows: list[list[int]] = []
    for text in texts:
        if rules.limit is not None and len(rows) >= rules.limit:
            break
        ids = encode(text)
        if ids and rules.begin_with is not None and ids[0] != rules.begin_with:
            ids = [rules.begin_with, *ids]
        if ids:
            rows.append(ids[: rules.max_tokens])
            progress(len(rows))
    return rows
