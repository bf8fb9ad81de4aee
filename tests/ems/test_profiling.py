"""The profiler's file (spec ems 6.2) in forked processes."""

import os
import signal
from pathlib import Path

from ems import CcConfig, EmsConfig
from ems.session import Session


def test_a_forked_child_profiles_into_a_file_of_its_own_whoever_held_the_parents(tmp_path, monkeypatch):
    monkeypatch.setenv("ENABLE_CC_PROFILING", "1")
    monkeypatch.setenv("EMS_SDK_LOG", str(tmp_path))
    session = Session(EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="m")), lambda _: Path("/none"))
    session._profiler.record("save", 1, 1, 1, 0.0)
    with session._profiler._lock:
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest-timeout's own handler would go on with the tests
            signal.alarm(5)
            session.after_fork()
            session._profiler.record("load", 1, 1, 1, 0.0)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    session.close()
    assert {path.name for path in tmp_path.iterdir()} == {f"ems_profiling_{pid}.log" for pid in (os.getpid(), child)}
