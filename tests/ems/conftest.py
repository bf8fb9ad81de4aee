"""An agent, a session on it, and its KV cache."""

from collections.abc import Iterator

import pytest
import torch

from ems.context_caching import ContextCaching
from kvloom.pool.agent import Agent
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
