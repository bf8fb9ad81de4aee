"""What a first start needs besides packages, made while these come: `PYTHONPATH=src python3 -m kvloom.prepare`.

The demo model is fetched and the kernels are compiled, with the standard library alone. What cannot be done now is left
to the start, which does it again and says why it cannot.
"""

import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from kvloom.checkpoints.demo_models import pull
from kvloom.contract.errors import UserError
from kvloom.rank.kernels.build import library

_NICE = 5  # packages come first: nothing starts without them


def main() -> None:
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # shells ignore it for what they start in the background
    with ThreadPoolExecutor(2) as side_by_side:
        for done in [side_by_side.submit(_try, work) for work in (lambda: pull("smollm2"), library)]:
            done.result()


def _try(work: Callable[[], object]) -> None:
    try:
        work()
    except (UserError, OSError) as error:
        print(f"kvloom: left to the start: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
