"""Mooncake Store behind an agent."""

import importlib
import os
import shutil
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvloom.pool.stores.engine import EngineError, EngineFull, open_engine
from tests.support.pool.agents import running_agent
from tests.support.pool.stores import check_round_trip
from tests.support.waiting import until


class FakeMooncake:
    """The part of `mooncake.store.MooncakeDistributedStore` that the adapter uses, with its return codes."""

    values: ClassVar[dict[str, bytes]] = {}
    arguments: ClassVar[tuple] = ()

    def setup(self, *arguments) -> int:
        FakeMooncake.arguments = arguments
        return -600 if arguments[-1].startswith("down") else 0

    def put_batch(self, names: list[str], values: list[bytes]) -> int:
        for name, value in zip(names, values, strict=True):
            self.values.setdefault(name, value)
        return 0

    def batch_get_buffer(self, names: list[str]) -> list:
        return [self.values.get(name) for name in names]

    def batch_is_exist(self, names: list[str]) -> list[int]:
        return [-1 if name == "bad" else int(name in self.values) for name in names]

    def close(self) -> int:
        return 0


@pytest.fixture
def mooncake(monkeypatch):
    module = types.ModuleType("mooncake.store")
    module.MooncakeDistributedStore = FakeMooncake
    monkeypatch.setitem(sys.modules, "mooncake", types.ModuleType("mooncake"))
    monkeypatch.setitem(sys.modules, "mooncake.store", module)
    monkeypatch.delitem(sys.modules, "kvloom.pool.stores.mooncake", raising=False)
    FakeMooncake.values = {}
    yield
    sys.modules.pop("kvloom.pool.stores.mooncake", None)


def test_mooncake_keeps_blocks_for_the_node(mooncake):
    with running_agent(rcache_share=1.0, engine="mooncake://10.0.0.1:50051?host=10.0.0.2&segment=1G") as agent:
        check_round_trip(agent)
    host, metadata, segment, _buffer, protocol, devices, master = FakeMooncake.arguments
    assert (host.split(":")[0], metadata, segment) == ("10.0.0.2", "P2PHANDSHAKE", 1 << 30)
    assert (protocol, devices, master) == ("tcp", "", "10.0.0.1:50051")


@pytest.fixture
def mooncake_address(tmp_path) -> Iterator[str]:
    """The URL of a real Mooncake Store master on this machine; `host` is the machine's address in its network."""
    command = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if command is None:
        pytest.skip("needs mooncake_master: pip install kvloom[mooncake]")
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"Mooncake cannot be loaded: {error}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing
        host = probe.getsockname()[0]
    if host.startswith("127."):
        pytest.skip("Mooncake refuses loopback addresses, and this machine has no other")
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ports.append(listener.getsockname()[1])
    with subprocess.Popen([command, f"-rpc_port={ports[0]}", f"-metrics_port={ports[1]}"], cwd=tmp_path) as process:
        until(lambda: _accepts(ports[0]))
        yield f"mooncake://127.0.0.1:{ports[0]}?host={host}&segment=64M"
        process.terminate()


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_real_mooncake_store_keeps_blocks_for_the_node(mooncake_address):
    with running_agent(rcache_share=1.0, engine=mooncake_address) as agent:
        check_round_trip(agent)


def test_mooncake_without_memory_is_full(mooncake, monkeypatch):
    monkeypatch.setattr(FakeMooncake, "put_batch", lambda *_: -200)
    with pytest.raises(EngineFull, match="-200"):
        open_engine("mooncake://up:1?host=10.0.0.2", "").put(["a"], [b"a"])


def test_mooncake_errors_are_engine_errors(mooncake):
    with pytest.raises(EngineError, match="-600"):
        open_engine("mooncake://down:1?host=10.0.0.2", "")
    engine = open_engine("mooncake://up:1?host=10.0.0.2", "")
    with pytest.raises(EngineError, match="-1"):
        engine.has(["bad"])


@pytest.mark.parametrize(
    ("address", "password", "problem"),
    [
        ("http://x", "", "'http' is none of mooncake"),
        ("mooncake://up:1", "", "own_address"),
        ("mooncake://up:1?host=a&size=1", "", "unknown option size"),
        ("mooncake://up:1?host=a", "secret", "no password"),
    ],
)
def test_a_wrong_address_is_refused(mooncake, address, password, problem):
    with pytest.raises(ValueError, match=f"engine: .*{problem}"):
        open_engine(address, password)


def test_a_missing_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvloom.pool.stores.mooncake", raising=False)
    for name in ("mooncake", "mooncake.store"):  # the second is in sys.modules if an earlier test loaded it
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match=r"kvloom\[mooncake\]"):
        open_engine("mooncake://up:1?host=a", "")
