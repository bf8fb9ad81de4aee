"""Mooncake Store behind an agent."""

import importlib
import os
import shutil
import socket
import subprocess
import sys
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from kvloom.pool.stores.engine import EngineError, EngineFull, open_engine
from tests.support.pool.agents import running_agent
from tests.support.pool.stores import check_round_trip
from tests.support.waiting import until


def rounded(size: int) -> int:
    """What the buffer's allocator takes for a value: eighths of powers of two."""
    step = 1 << max(0, size.bit_length() - 4)
    return -(-size // step) * step


class Handle(bytearray):
    """A value in the buffer, as long as it lives."""


class FakeMooncake:
    """The part of `mooncake.store.MooncakeDistributedStore` that the adapter uses, with its return codes and its
    buffer, which all values under way share: what finds no room there does not come, or is not stored.
    """

    values: ClassVar[dict[str, bytes]] = {}
    arguments: ClassVar[tuple] = ()
    buffer_bytes: ClassVar[int] = 0  # set by tests; 0 = without a limit
    held_bytes: ClassVar[int] = 0

    @classmethod
    def takes(cls, size: int) -> bool:
        """Whether a value finds room."""
        if cls.buffer_bytes and cls.held_bytes + rounded(size) > cls.buffer_bytes:
            return False
        cls.held_bytes += rounded(size)
        return True

    @classmethod
    def release(cls, size: int) -> None:
        cls.held_bytes -= rounded(size)

    def setup(self, *arguments) -> int:
        FakeMooncake.arguments = arguments
        return -600 if arguments[-1].startswith("down") else 0

    def put_batch(self, names: list[str], values: list[bytes]) -> int:
        taken = [value for value in values if self.takes(len(value))]
        if len(taken) == len(values):
            for name, value in zip(names, values, strict=True):
                self.values.setdefault(name, value)
        for value in taken:
            self.release(len(value))
        return 0 if len(taken) == len(values) else -600

    def batch_get_buffer(self, names: list[str]) -> list:
        return [self._handle(self.values.get(name)) for name in names]

    def _handle(self, value: bytes | None) -> Handle | None:
        if value is None or not self.takes(len(value)):
            return None
        handle = Handle(value)
        weakref.finalize(handle, FakeMooncake.release, len(value))
        return handle

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
    FakeMooncake.values, FakeMooncake.buffer_bytes, FakeMooncake.held_bytes = {}, 0, 0
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
    """The URL of a real Mooncake Store master on this machine."""
    command = shutil.which("mooncake_master", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if command is None:
        pytest.skip("needs mooncake_master: pip install kvloom[mooncake]")
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        pytest.skip(f"Mooncake cannot be loaded: {error}")
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ports.append(listener.getsockname()[1])
    with subprocess.Popen([command, f"-rpc_port={ports[0]}", f"-metrics_port={ports[1]}"], cwd=tmp_path) as process:
        until(lambda: _accepts(ports[0]))
        yield f"mooncake://127.0.0.1:{ports[0]}?host=127.0.0.1&segment=64M"
        process.terminate()


def _accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_real_mooncake_store_keeps_blocks_for_the_node(mooncake_address):
    with running_agent(rcache_share=1.0, engine=mooncake_address) as agent:
        check_round_trip(agent)


def few(engine, size: int, num: int) -> tuple[list[str], list[bytes]]:
    names = [f"n{size}-{i}" for i in range(num)]
    values = [bytes([i]) * size for i in range(num)]
    engine.put(names, values)
    return names, values


@pytest.mark.parametrize("size", [7000, 130_000, 900_000])
def test_values_that_exceed_the_buffer_together_are_stored_and_come_all_the_same(mooncake, monkeypatch, size):
    engine = open_engine("mooncake://up:1?host=10.0.0.2", "")
    FakeMooncake.buffer_bytes = 1 << 20
    scale(engine, 1 << 20, monkeypatch)
    names, values = few(engine, size, 40)
    assert engine.has(names) == [True] * 40
    for _ in range(2):  # their size is not known before the first time
        assert engine.get([*names, "another"]) == [*values, None]
    assert FakeMooncake.held_bytes == 0


def test_values_of_many_sizes_come_whatever_came_before(mooncake, monkeypatch):
    engine = open_engine("mooncake://up:1?host=10.0.0.2", "")
    FakeMooncake.buffer_bytes = 1 << 20
    scale(engine, 1 << 20, monkeypatch)
    small, large = few(engine, 1000, 40), few(engine, 600_000, 3)
    assert engine.get(small[0]) == small[1]
    assert engine.get(large[0] + small[0]) == large[1] + small[1]


def scale(engine, buffer_bytes: int, monkeypatch) -> None:
    """Gives an engine a buffer of that size, with parts in proportion."""
    module = sys.modules["kvloom.pool.stores.mooncake"]
    monkeypatch.setattr(module, "_PART_BYTES", buffer_bytes // 10)
    engine._room = module._Room(buffer_bytes)
    engine._largest = buffer_bytes // 20


def test_a_buffer_in_pieces_is_waited_for_whole(mooncake, monkeypatch):
    engine, refused = open_engine("mooncake://up:1?host=10.0.0.2", ""), [True]
    put = FakeMooncake.put_batch
    monkeypatch.setattr(FakeMooncake, "put_batch", lambda *each: -600 if refused and refused.pop() else put(*each))
    engine.put(["a"], [b"a"])
    assert engine.get(["a"]) == [b"a"]
    monkeypatch.setattr(FakeMooncake, "put_batch", lambda *_: -600)
    with pytest.raises(EngineError, match="-600"):
        engine.put(["b"], [b"b"])


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
