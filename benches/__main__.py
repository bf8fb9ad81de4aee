"""`python -m benches [NAME ...]` runs benches, each in its own process; without names all that need no options.

A name is that of a folder or of a bench in it: `python -m benches kernels pool.native`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

NEED_OPTIONS = {"fleet.replicas", "kernels.llama_cpp", "server.peers"}
HERE = Path(__file__).parent


def benches() -> list[str]:
    """The names of all benches that can be run, as folder.name."""
    paths = sorted(path for path in HERE.glob("*/*.py") if "__main__" in path.read_text())
    return [f"{path.parent.name}.{path.stem}" for path in paths]


def main() -> int:
    every = benches()
    folders = sorted({name.partition(".")[0] for name in every})
    parser = argparse.ArgumentParser(
        prog="python -m benches", description=__doc__, epilog=f"benches: {', '.join(every)}"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", default=folders)
    chosen = []
    for word in parser.parse_args().names:
        if word not in (*folders, *every):
            parser.error(f"there is no {word}")
        of_folder = [name for name in every if name.startswith(f"{word}.") and name not in NEED_OPTIONS]
        chosen += of_folder or [word]
    return max(subprocess.run([sys.executable, "-m", f"benches.{name}"], check=False).returncode for name in chosen)


if __name__ == "__main__":
    sys.exit(main())
