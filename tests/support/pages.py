"""Commands of the documents, as a user with a home of their own copies them into a shell."""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


def run_as_user(script: str, home: Path, environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs the script in `home`, with `kvloom` on the PATH; it ends at the first command that fails."""
    command = home / "bin" / "kvloom"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f"#!{sys.executable}\nfrom kvloom.cli import main; main()\n")
    command.chmod(0o700)
    path = f"{command.parent}:{environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=home, env={**environ, "HOME": str(home), "PATH": path}, capture_output=True, text=True, check=False,
        timeout=100,
    )  # fmt: skip
