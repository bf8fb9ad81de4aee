"""`python -m kvloom.vllm.check`: whether the installed vLLM accepts the arguments for the EngineConfig on stdin.

Exit code 0, or 1 and one line on stderr.
"""

import os
import sys

import msgspec

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ServingError
from kvloom.vllm.arguments import arguments_of
from kvloom.vllm.parsing import parse


def main() -> None:
    """See the module."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        parse(arguments_of(msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)))
    except ServingError as error:
        print(error, file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
