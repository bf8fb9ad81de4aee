"""An agent, a session on it, and its KV cache."""

from collections.abc import Iterator

import pytest
import torch

from ems.context_caching import ContextCaching
from ems.native.functions import functions as of_sdk
from kvloom.pool.agent import Agent
from kvloom.pool.cluster.native.library import functions as of_stream
from kvloom.pool.storage.native.library import functions as of_index
from tests.support.pool.agents import new_kv, running_agent, session


@pytest.fixture
def agent() -> Iterator[Agent]:
    with running_agent() as running:
        yield running


@pytest.fixture
def kv() -> list[list[torch.Tensor]]:
    return new_kv()


@pytest.fixture
def cc(agent: Agent, kv: list[list[torch.Tensor]]) -> Iterator[ContextCaching]:
    with session(agent.config.socket, kv) as caching:
        yield caching


@pytest.fixture(scope="session")
def native() -> None:
    """For tests of the C++ libraries, which are compiled when a test runs and not when tests are collected."""
    if of_index() is None or of_sdk() is None or of_stream() is None:
        pytest.skip("there is no C++ compiler")


@pytest.fixture(params=["native", "python"])
def either_kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a test with the C++ libraries and without them."""
    monkeypatch.setenv("EMS_NATIVE", "1" if request.param == "native" else "0")
    if request.param == "native" and of_stream() is None:
        pytest.skip("there is no C++ compiler")
