"""A server that keeps responses, for the tests of this folder."""

from collections.abc import Iterator

import pytest

from kvloom.server.keeping.store import ResponseStore
from tests.support.servers import FakeServer, fake_server


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ResponseStore]:
    store = ResponseStore(tmp_path_factory.mktemp("store") / "responses.db")
    yield store
    store.close()


@pytest.fixture(scope="module")
def keeping(store: ResponseStore) -> Iterator[FakeServer]:
    with fake_server(store=store) as server:
        yield server
