"""A control plane: its state, its application, and one that listens."""

import socket
import time
from contextlib import closing

import httpx
import pytest
import uvicorn
from starlette.testclient import TestClient

from kvloom.pool.control.service import build_app
from kvloom.pool.control.state import ControlState
from tests.support.asgi import PromptServer, in_thread
from tests.support.pool.agents import SECRET
from tests.support.pool.control import ADMIN, TOKEN, Clock


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def state(clock):
    with closing(ControlState(":memory:", clock)) as opened:
        yield opened


@pytest.fixture
def api(state):
    return TestClient(build_app(state, TOKEN, SECRET), headers=ADMIN)


@pytest.fixture
def served(clock):
    """An admin client of a control plane that listens on a port."""
    with closing(ControlState(":memory:", time.time)) as state, socket.create_server(("127.0.0.1", 0)) as sock:
        config = uvicorn.Config(build_app(state, TOKEN, SECRET), log_level="error", lifespan="off", ws="none")
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        with in_thread(PromptServer(config), sock), httpx.Client(base_url=url, headers=ADMIN) as client:
            yield client
