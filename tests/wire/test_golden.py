"""Every route and dialect, streaming and not, against the golden files (`make golden` writes them again).

Over vLLM, whose tokens differ, only their shape is compared: status, headers, names and kinds of all values, and the
order of a stream's events.
"""

from collections.abc import Iterator

import pytest

from tests.support.servers import OVER_VLLM, FakeServer
from tests.wire import sampling_table
from tests.wire.cases import CASES, Case
from tests.wire.golden import FOLDER, golden_server, read, shape, shown

_EMBEDS = ("ollama-embed", "ollama-embeddings", "embeddings", "embeddings-base64")
_REFUSED = (*_EMBEDS, "embeddings-error")


@pytest.fixture(scope="module")
def golden() -> Iterator[FakeServer]:
    with golden_server() as server:
        yield server


@pytest.fixture(scope="module")
def embedding(golden: FakeServer) -> Iterator[FakeServer]:
    """A server that makes embeddings; vLLM makes them only when it was started with the pooling runner."""
    if not OVER_VLLM:
        yield golden
        return
    with golden_server(plugin_options={"runner": "pooling"}) as server:
        yield server


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_wire_is_as_written_down(golden: FakeServer, case: Case):
    if not OVER_VLLM:
        assert shown(golden, case) == read(case)
    elif case.name in _REFUSED:
        assert "400 Bad Request" in shown(golden, case)
        assert "vLLM was started to generate; --vllm runner=pooling makes embeddings" in shown(golden, case)
    else:
        assert shape(shown(golden, case)) == shape(read(case))


@pytest.mark.parametrize("case", [case for case in CASES if case.name in _EMBEDS], ids=lambda case: case.name)
def test_embeddings_are_as_written_down(embedding: FakeServer, case: Case):
    assert shape(shown(embedding, case)) == shape(read(case))


def test_there_is_a_file_for_every_case_and_a_case_for_every_route(golden: FakeServer):
    assert {file.stem for file in FOLDER.iterdir()} == {case.name for case in CASES}
    for path, operations in golden.client.get("/openapi.json").json()["paths"].items():
        for method in operations:
            if path not in NOT_SHOWN and not path.startswith("/console"):
                parts = path.split("/")
                found = [case for case in CASES if case.method == method.upper() and _fits(parts, case.path)]
                assert found, f"no case for {method} {path}"


# stopping ends the server; times and machines differ; other tests check the description and the console
NOT_SHOWN = {"/stopService", "/openapi.json", "/docs", "/metrics", "/v2/models/stats", "/server_info"}


def _fits(parts: list[str], path: str) -> bool:
    own = path.partition("?")[0].split("/")
    return len(own) == len(parts) and all("{" in part or part == mine for part, mine in zip(parts, own, strict=True))


def test_the_page_has_the_sampling_parameters_that_there_are():
    assert sampling_table.written() == sampling_table.table()
