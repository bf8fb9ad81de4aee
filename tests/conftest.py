"""Fixtures that many tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from kvloom.engine.hub import pull
from tests.support.servers import FakeServer, fake_server

settings.register_profile("kvloom", deadline=None)
settings.load_profile("kvloom")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The demo model, fetched once into the user's cache."""
    return pull("smollm2")


@pytest.fixture(scope="module")
def server() -> Iterator[FakeServer]:
    """A server on a free port over the fake model."""
    with fake_server() as running:
        yield running
