"""Ems (spec ems 6, 7, 9): init once, health, embedded mode, restart of the agent, fork, killed parents."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

import ems
from ems import CcConfig, CcConfig_v1, CcResult, Ems, EmsConfig, EmsErrorCode, EmsException, KvStatus, private_agent
from ems.common import sockets
from ems.common.sockets import find_socket
from ems.private_agent import EmbeddedAgent
from kvloom.pool.doctor import check_machine
from tests.support.pool.agents import copy_of, new_kv, running_agent, shared_files, slots_of, tokens_of, zero
from tests.support.waiting import soon, until


def config(**changes):
    return EmsConfig(cc_config=CcConfig(**{"rank_id": 8, "device_id": 0, "model_id": "llama2-13b", **changes}))


@pytest.fixture
def _no_agent(monkeypatch, tmp_path):
    """Ems finds no agent, even if one runs on this machine, and is shut down afterwards."""
    monkeypatch.delenv("EMS_SOCKET", raising=False)
    monkeypatch.setattr(sockets, "DOCUMENTED_SOCKET", tmp_path / "documented" / "ems.sock")
    monkeypatch.setattr(sockets, "own_folder", lambda: tmp_path / "own")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield
    Ems.shutdown()


@pytest.mark.usefixtures("_no_agent")
class TestInit:
    def test_without_an_agent_init_raises_io_error_and_get_cc_is_none(self, caplog):
        with pytest.raises(EmsException) as caught:
            Ems.init(config())
        assert caught.value.status_code() == EmsErrorCode.EMS_IO_ERROR
        assert "EMS init failed" in caplog.text  # spec ems 10.1
        assert Ems.get_cc() is None
        assert Ems.check_health() is False

    def test_init_takes_a_config_and_only_that(self):
        for wrong in (None, {}, EmsConfig()):
            with pytest.raises(EmsException) as caught:
                Ems.init(wrong)
            assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT

    def test_a_process_is_initialised_once(self, monkeypatch):
        with running_agent() as agent:
            monkeypatch.setenv("EMS_SOCKET", str(agent.config.socket))
            Ems.init(config())
            first = Ems.get_cc()
            Ems.init(EmsConfig(cc_config_v1=CcConfig_v1(rank_id=8, device_id=0, model_id="llama2-13b")))
            assert Ems.get_cc() is first
            with pytest.raises(EmsException, match="config"):
                Ems.init(config(rank_id=9))
            Ems.shutdown()
            assert Ems.get_cc() is None

    def test_the_socket_is_searched_in_order(self, monkeypatch, tmp_path):
        assert find_socket() is None
        path = tmp_path / "ems" / "ems.sock"
        path.parent.mkdir()
        path.touch()
        assert find_socket() == path
        monkeypatch.setenv("EMS_SOCKET", "/named")
        assert find_socket() == Path("/named")

    def test_a_socket_of_a_killed_agent_hides_nobody_elses(self, monkeypatch, tmp_path):
        left, served = tmp_path / "left.sock", tmp_path / "ems" / "ems.sock"
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(left))
        monkeypatch.setattr(sockets, "DOCUMENTED_SOCKET", left)
        with pytest.raises(EmsException, match=f"nothing serves {left}; start `kvloom pool agent`"):
            Ems.init(config())
        with running_agent(socket=served):
            assert find_socket() == served
            Ems.init(config())
            assert Ems.check_health()

    def test_a_folder_that_this_user_may_not_see_hides_nobody_elses(self, monkeypatch, tmp_path):
        class Hidden(type(tmp_path)):
            def exists(self):
                if self.name == "ems.sock":
                    raise PermissionError(13, "Permission denied", str(self))
                return super().exists()

        monkeypatch.setattr(sockets, "DOCUMENTED_SOCKET", Hidden(tmp_path / "of root" / "ems.sock"))
        assert find_socket() is None
        problems = {check.name: check.problem for check in check_machine(None, "", "")}
        assert problems["agent"].startswith("this user sees none of ")
        with running_agent(socket=tmp_path / "ems" / "ems.sock") as agent:
            assert find_socket() == agent.config.socket

    def test_a_restarted_agent_is_empty_and_found_again(self, monkeypatch, tmp_path):
        socket, kv = tmp_path / "a.sock", new_kv()
        monkeypatch.setenv("EMS_SOCKET", str(socket))
        with running_agent(socket=socket):
            Ems.init(config())
            cc = Ems.get_cc()
            cc.register_kvcache(kv)
            assert cc.save(slots_of(0), [1], [4]) == CcResult(1, 1)
            assert Ems.check_health() is True
        assert Ems.check_health() is False
        with pytest.raises(EmsException) as caught:
            cc.load(slots_of(0), [1], [4])
        assert caught.value.status_code() == EmsErrorCode.EMS_IO_ERROR
        assert cc.exists([1]) == 0
        with running_agent(socket=socket):
            assert Ems.check_health() is True
            assert cc.load(slots_of(0), [1], [4]) == CcResult(0, 1)
            assert cc.save(slots_of(0), [1], [4]) == CcResult(1, 1)
            assert cc.load(slots_of(0), [1], [4]) == CcResult(1, 1)

    def test_a_second_agent_does_not_take_the_socket(self, tmp_path):
        with (
            running_agent(socket=tmp_path / "a.sock"),
            pytest.raises(OSError, match="is in use by another program"),
            running_agent(socket=tmp_path / "a.sock"),
        ):
            pass


@pytest.mark.usefixtures("_no_agent")
def test_an_embedded_agent_that_hangs_is_replaced(monkeypatch):
    monkeypatch.setattr(private_agent, "_LOOK_S", 0.2)
    with ems.embedded(pool="16M") as agent:
        Ems.init(config())
        before = agent.pid
        os.kill(before, signal.SIGSTOP)
        until(lambda: Ems.check_health() and agent.pid != before)
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)


@pytest.mark.usefixtures("_no_agent")
class TestEmbedded:
    def test_the_context_gives_a_private_agent_and_ends_it(self):
        with ems.embedded(pool="32M") as agent:
            pid = agent.pid
            Ems.init(config())
            cc, kv = Ems.get_cc(), new_kv()
            cc.register_kvcache(kv)
            before = copy_of(kv)
            assert cc.save(slots_of(0, 1), [1, 2], [4, 4]).success == 2
            zero(kv)
            assert cc.load(slots_of(0, 1), [1, 2], [4, 4]).success == 2
            assert (tokens_of(kv, slots_of(0, 1)) == tokens_of(before, slots_of(0, 1))).all()
            folder = agent.locate(soon()).parent
        assert not folder.exists()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    def test_values_by_keys_are_kept_there_too(self):
        with ems.embedded("16M"), ems.open_pool(config()) as pool:
            assert pool.put(["a"], [b"1"]) == [KvStatus.STORED]
            assert pool.exists(["a"], [1]) == [True]

    def test_whoever_goes_on_after_its_end_starts_no_other_agent(self):
        with ems.embedded("16M") as agent:
            pool = ems.open_pool(config())
            assert pool.put(["a"], [b"1"]) == [KvStatus.STORED]
        with pool, pytest.raises(EmsException, match="the embedded agent was ended"):
            pool.put(["a"], [b"1"])
        with pytest.raises(ConnectionRefusedError):
            _ = agent.pid

    def test_a_socket_that_a_killed_agent_left_is_nobodys(self, monkeypatch, tmp_path):
        left = tmp_path / "ems" / "ems.sock"
        left.parent.mkdir(exist_ok=True)
        with socket.socket(socket.AF_UNIX) as gone:
            gone.bind(str(left))
        assert find_socket() is not None
        monkeypatch.setenv("EMS_EMBEDDED", "1")
        Ems.init(config())
        assert Ems.check_health()

    def test_a_config_that_changes_after_init_is_another_one(self):
        with ems.embedded(pool="32M"):
            one = config()
            Ems.init(one)
            cc = Ems.get_cc()
            cc.register_kvcache(new_kv())
            cc.save(slots_of(0), [1], [4])
            one.cc_config.model_id = "another"
            with pytest.raises(EmsException, match="config: Ems is initialised with another one"):
                Ems.init(one)
            cc.register_kvcache(new_kv())
            assert cc.exists([1]) == 1, "names are those of the config at init"

    def test_a_killed_agent_is_started_again(self):
        with ems.embedded(pool="32M") as agent:
            Ems.init(config())
            cc = Ems.get_cc()
            cc.register_kvcache(new_kv())
            cc.save(slots_of(0), [1], [4])
            os.kill(agent.pid, signal.SIGKILL)
            os.waitpid(agent.pid, 0)
            cc.save(slots_of(0), [1], [4])
            assert cc.load(slots_of(0), [1], [4]).success == 1

    def test_no_caller_waits_beyond_its_deadline_for_an_agent_that_another_one_starts(self, monkeypatch):
        stuck = (sys.executable, "-c", "import sys; sys.stdin.read()")  # it never serves
        monkeypatch.setattr(private_agent, "AGENT", stuck)
        agent = EmbeddedAgent("16M")
        is_over = threading.Event()

        def start() -> None:
            with suppress(OSError):
                agent.locate(soon())
            is_over.set()

        try:
            threading.Thread(target=start, daemon=True).start()
            until(lambda: agent._process is not None and not agent._lock.locked())
            with pytest.raises(TimeoutError, match="still starting"):
                agent.locate(0.0)
            assert not is_over.is_set()
        finally:
            agent.stop()
        until(is_over.is_set)

    def test_a_forked_child_uses_the_pool_by_connections_of_its_own(self):
        with ems.embedded(pool="32M"):
            Ems.init(config())
            cc, kv = Ems.get_cc(), new_kv()
            cc.register_kvcache(kv)
            cc.async_save(slots_of(0), [1], [4]).result()
            child = subprocess_fork(lambda: cc.async_load(slots_of(7), [1], [4]).result().success == 1)
            assert cc.load(slots_of(8), [1], [4]).success == 1
            assert child == 0
            assert Ems.check_health()

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_a_killed_parent_leaves_no_agent_and_no_file(self, number, tmp_path):
        code = (
            "import ems, os, time\n"
            "from ems import *\n"
            "from ems.common import sockets\n"
            "sockets.candidates = list\n"
            "Ems.init(EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id='m')))\n"
            "from ems import ems as inner\n"
            "print(inner._state.embedded.pid, flush=True)\n"
            "time.sleep(60)\n"
        )
        before = shared_files()
        env = {**os.environ, "EMS_EMBEDDED": "1", "TMPDIR": str(tmp_path)}
        with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE) as parent:
            pid = int(parent.stdout.readline())
            parent.send_signal(number)
            parent.wait()
        until(lambda: has_ended(pid))
        assert not list(tmp_path.iterdir())
        assert shared_files() <= before


def has_ended(pid: int) -> bool:
    """Whether the process is gone or a zombie."""
    try:
        return " Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def subprocess_fork(task) -> int:
    """Exit status of a forked child that runs `task`: 0 when it returned True."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if task() else 1
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
