from collections.abc import Iterator

import pytest

from mindieclient.python.httpclient import MindIEHTTPClient
from tests.support.wire.triton import FakeTriton, serving


@pytest.fixture
def fake() -> FakeTriton:
    return FakeTriton()


@pytest.fixture
def url(fake: FakeTriton) -> Iterator[str]:
    with serving(fake.app()) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def client(url: str) -> Iterator[MindIEHTTPClient]:
    with MindIEHTTPClient(url, concurrency=4) as client:
        yield client
