"""`python -m benches [NAME ...]` runs the named benches, or all of them, each in a process of its own."""

import subprocess
import sys
from pathlib import Path


def main() -> int:
    names = sys.argv[1:] or sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    return max(subprocess.run([sys.executable, "-m", f"benches.{name}"], check=False).returncode for name in names)


if __name__ == "__main__":
    sys.exit(main())
