"""Gewu through the C ABI: the library's and the daemon's own cost, and interactive work beside background work.

`python -m benches.gewu.calls [REAL_MODEL]`; without a model only the fake engine is measured.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.support.gewu.daemons import DaemonProcess, compile_c, make_model, run_program, until

from kvloom.checkpoints.demo_models import find_model

SOURCE = Path(__file__).with_suffix(".c")


def main() -> None:
    bench(sys.argv[1] if len(sys.argv) > 1 else None)


def bench(real_model: str | None) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = compile_c(SOURCE)
        measure(program, DaemonProcess(folder, {}, GEWU_IDLE_UNLOAD_S="1"), str(make_model(folder / "model")), "fake")
        if real_model is not None:
            real = folder / "real"
            real.mkdir()
            model = str(find_model(real_model).resolve())
            measure(program, DaemonProcess(real, None, GEWU_IDLE_UNLOAD_S="1"), model, "real")


def measure(program: Path, daemon: DaemonProcess, model: str, mode: str) -> None:
    try:
        before = rss_bytes(daemon.process.pid)
        for line in run_program(program, daemon, model, mode, timeout_s=300).splitlines():
            name, value, unit = line.split()
            print(json.dumps({"bench": "gewu", "engine": mode, "name": name, "value": float(value), "unit": unit}))
        until(lambda: all(found["state"] == "absent" for found in daemon.status()["models"]))
        grown = (rss_bytes(daemon.process.pid) - before) / 2**20
        print(json.dumps({"bench": "gewu", "engine": mode, "name": "daemon_grown", "value": grown, "unit": "MiB"}))
    finally:
        daemon.stop()


def rss_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
