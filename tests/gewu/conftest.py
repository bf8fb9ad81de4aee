"""Fixtures: daemons with a fake engine, and a model folder for them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.gewu.daemons import Client, DaemonProcess, make_model

RATE = 200.0  # tokens a second


@pytest.fixture
def start_daemon(tmp_path: Path) -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons that only this test uses."""
    daemons: list[DaemonProcess] = []

    def start(fake: dict[str, Any] | None = None, *options: str, **environ: str) -> DaemonProcess:
        folder = tmp_path / f"daemon{len(daemons)}"
        folder.mkdir()
        daemons.append(DaemonProcess(folder, fake, *options, **environ))
        return daemons[-1]

    yield start
    for daemon in daemons:
        daemon.stop()


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon shared by all tests that leave no state in it."""
    found = DaemonProcess(tmp_path_factory.mktemp("daemon"), {"rate": RATE})
    yield found
    found.stop()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def start_client() -> Iterator[Callable[[DaemonProcess], Client]]:
    """Starts apps that end with the test."""
    clients: list[Client] = []

    def start(daemon: DaemonProcess) -> Client:
        clients.append(Client(daemon))
        return clients[-1]

    yield start
    for client in clients:
        client.close()


@pytest.fixture(scope="session")
def client(daemon: DaemonProcess) -> Iterator[Client]:
    """One app shared by all tests of single calls."""
    found = Client(daemon)
    yield found
    found.close()
