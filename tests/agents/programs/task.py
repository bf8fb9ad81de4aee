"""The tools of the programs in this folder, and their task."""

import os
import subprocess
from pathlib import Path

TASK, MODEL, URL = os.environ["TASK"], os.environ["MODEL"], os.environ["OPENAI_BASE_URL"]


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: of the file
    """
    return Path(path).read_text()


def write_file(path: str, text: str) -> str:
    """Write a file.

    Args:
        path: of the file
        text: its whole content
    """
    Path(path).write_text(text)
    return "written"


def run(command: str) -> str:
    """Run a command in a shell.

    Args:
        command: the command
    """
    return subprocess.run(command, shell=True, capture_output=True, text=True, check=False).stdout


TOOLS = (read_file, write_file, run)
