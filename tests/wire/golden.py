"""Golden files: a request and its answer, byte for byte, in one readable text. Run as a module it writes them again.

What differs from run to run (ids, times, the version) is replaced by placeholders in `stable`, and only there.
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import msgspec
from tools import wire_header

from kvloom.server.serving.options import WireOptions
from tests.support.servers import FakeServer, fake_server
from tests.support.waiting import until
from tests.wire import sampling_table
from tests.wire.cases import CASES, MODEL, Case

FOLDER = Path(__file__).parent / "golden"
KEPT_HEADERS = ("content-type", "retry-after", "allow", "x-accel-buffering", "cache-control", "x-compute-type")
_UNSTABLE = (
    (r'"(chatcmpl-|cmpl-|resp_|msg_|rerank-|score-)[0-9a-f]{32}"', r'"\1ID"'),
    (r'"id":"[0-9a-f]{32}"', '"id":"ID"'),
    (r'"(created|created_at)":\d+', r'"\1":TIME'),
    (r'"(created_at|modified_at)":"[^"]+"', r'"\1":"TIME"'),
    (r'"(total_duration|prompt_eval_duration|eval_duration)":\d+', r'"\1":NS'),
    (r'"(first_token_cost|decode_cost|queue_wait_time)":[\d.e-]+', r'"\1":MS'),
    (r'("__name__":"(?:TTFT|TBT)"[^]]*\],"value":)"[\d.e+-]+"', r'\1"MS"'),
    (r'"version":"\d+\.\d+[^"]*"', '"version":"VERSION"'),
)


@contextmanager
def golden_server(**config: object) -> Iterator[FakeServer]:
    """A server with maxSeqLen 2048 and the other limits that the files show. `config`: more fields of EngineConfig."""
    options = WireOptions(validates_model=True)
    limits = {"max_iter_times": 512, "enable_prefix_cache": False, **config}
    with fake_server(names=(MODEL,), options=options, max_link_num=300, **limits) as server:
        yield server


def stable(text: str) -> str:
    for pattern, replacement in _UNSTABLE:
        text = re.sub(pattern, replacement, text)
    return text


def shown(server: FakeServer, case: Case) -> str:
    """Send the request; both it and the answer in the form of the file. NUL is written as <NUL>."""
    body = msgspec.json.encode(case.body).decode() if case.body is not None else None
    until(lambda: server.engine.stats().num_running == 0)  # the files show the counts of an idle server
    lines = [f"{case.method} {case.path}", *(f"{name}: {value}" for name, value in case.headers.items())]
    lines += ["", body] if body is not None else []
    response = server.client.request(case.method, case.path, content=body, headers=case.headers)
    kept = [f"{name}: {response.headers[name]}" for name in KEPT_HEADERS if name in response.headers]
    answer = stable(response.text).replace("\0", "<NUL>\n")
    return "\n".join(
        [*lines, "", f"{response.status_code} {httpx.codes(response.status_code).phrase}", *kept, "", answer]
    )


def shape(shown: str) -> list[object]:
    """The part of `shown` that is the same with any engine; in a good answer values are replaced by their kinds.

    Consecutive equal shapes count as one: events of a stream, elements of a list.
    """
    head, status, rest = re.split(r"^(\d{3} [A-Z].*)$\n", shown, maxsplit=1, flags=re.MULTILINE)
    headers, _, body = rest.partition("\n\n")
    told: list[object] = [head, status, headers]
    if not status.startswith("2"):
        return [*told, body]
    frames = re.sub(r":(TIME|NS|MS)\b", ":0", body).replace("<NUL>", "").split("\n\n")
    return [*told, _once(_once(map(_line_shape, frame.split("\n"))) for frame in frames)]


def _line_shape(line: str) -> object:
    found = re.fullmatch(r"(data: ?|event: )?(.*)", line, re.DOTALL)
    assert found is not None
    name, data = found.groups()
    return (name, _kinds(json.loads(data)) if data[:1] in ("{", "[") and data != "[DONE]" else data)


def _kinds(value: object) -> object:
    if isinstance(value, dict):
        if set(map(type, value.values())) == {float}:  # log-probabilities by token
            return {"": "number"}
        return {name: _kinds(held) for name, held in value.items()}
    if isinstance(value, list):
        return _once(_kinds(held) for held in value)
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def _once(values: Iterable[object]) -> list[object]:
    return [value for value, _ in itertools.groupby(values)]


def read(case: Case) -> str:
    """The text of a case's file."""
    return (FOLDER / f"{case.name}.txt").read_text()


def write() -> None:
    """Write the files of all cases; delete others."""
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    with golden_server() as server:
        for case in CASES:
            (FOLDER / f"{case.name}.txt").write_text(shown(server, case))


if __name__ == "__main__":
    write()
    sampling_table.write()
    wire_header.write()
