"""The specification's demo, unchanged, many times against a real model at the path that is fixed in it.

`python -m benches.gewu.demo [MODEL] [TIMES]`, by default smollm2 and 500. Every run must return 0.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

from tests.support.gewu.daemons import DEMO_MODEL, DaemonProcess, compile_demo, has_nlohmann, run_program

from kvloom.checkpoints.demo_models import find_model

_RUN_TIMEOUT_S = 60.0  # limit of one run, on a busy machine


def main() -> None:
    measure(sys.argv[1] if len(sys.argv) > 1 else "smollm2", int(sys.argv[2]) if len(sys.argv) > 2 else 500)


def measure(name_of_model: str, times: int) -> None:
    if not has_nlohmann():
        raise SystemExit("needs c++ and nlohmann/json.hpp (Debian: nlohmann-json3-dev)")
    model = str(find_model(name_of_model).resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = compile_demo(folder, "-std=c++17")
        daemon = DaemonProcess(folder, None, "--alias", f"{DEMO_MODEL}={model}")
        try:
            began_s = time.monotonic()
            run_program(program, daemon, str(times), timeout_s=_RUN_TIMEOUT_S * times)
            took_s = time.monotonic() - began_s
            found = daemon.model()
        finally:
            daemon.stop()
    for metric, value, unit in (
        ("demo_runs_with_rc_0", times, "runs"),
        ("demo_run", took_s / times, "s"),
        ("demo_loads", found["loads"], "loads"),
    ):
        print(json.dumps({"bench": "gewu_demo", "engine": "real", "name": metric, "value": value, "unit": unit}))


if __name__ == "__main__":
    main()
