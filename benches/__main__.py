"""`python -m benches [NAME ...]` runs the named benches, or all that need no options, each in a process of its own."""

import subprocess
import sys
from pathlib import Path

NEED_OPTIONS = {"fleet", "llama_cpp", "peers"}


def main() -> int:
    every = {path.stem for path in Path(__file__).parent.glob("[a-z]*.py")}
    names = sys.argv[1:] or sorted(every - NEED_OPTIONS)
    return max(subprocess.run([sys.executable, "-m", f"benches.{name}"], check=False).returncode for name in names)


if __name__ == "__main__":
    sys.exit(main())
