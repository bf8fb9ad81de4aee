"""Every route and dialect, streaming and not, against the golden files (`make golden` writes them again)."""

from collections.abc import Iterator

import pytest

from tests.support.servers import FakeServer
from tests.wire.cases import CASES, Case
from tests.wire.golden import FOLDER, golden_server, read, shown


@pytest.fixture(scope="module")
def golden() -> Iterator[FakeServer]:
    with golden_server() as server:
        yield server


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_wire_is_as_written_down(golden: FakeServer, case: Case):
    assert shown(golden, case) == read(case)


def test_there_is_a_file_for_every_case_and_a_case_for_every_route(golden: FakeServer):
    assert {file.stem for file in FOLDER.iterdir()} == {case.name for case in CASES}
    for path, operations in golden.client.get("/openapi.json").json()["paths"].items():
        for method in operations:
            if path not in NOT_SHOWN and not path.startswith("/console"):
                parts = path.split("/")
                found = [case for case in CASES if case.method == method.upper() and _fits(parts, case.path)]
                assert found, f"no case for {method} {path}"


# stopping ends the server, times and machines differ; the description and the console are checked on their own
NOT_SHOWN = {"/stopService", "/openapi.json", "/docs", "/metrics", "/v2/models/stats", "/server_info"}


def _fits(parts: list[str], path: str) -> bool:
    own = path.partition("?")[0].split("/")
    return len(own) == len(parts) and all("{" in part or part == mine for part, mine in zip(parts, own, strict=True))
