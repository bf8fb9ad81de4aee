"""Keep files and functions short: `python tools/lines.py` exits 1 and names what is over the limit."""

import ast
import sys
from pathlib import Path

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
FOLDERS = ("src", "tests", "tools", "benches", "examples")
SUFFIXES = {".py", ".c", ".cpp", ".h", ".hpp", ".js", ".mjs"}


def long_functions(path: Path) -> list[str]:
    """Functions of a Python file that exceed the limit, docstring included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, the limit is {MAX_FUNCTION_LINES}")
    return found


def main() -> int:
    problems = []
    for folder in FOLDERS:
        for path in sorted(p for p in Path(folder).rglob("*") if p.suffix in SUFFIXES and "vendor" not in p.parts):
            lines = len(path.read_text().splitlines())
            if lines > MAX_FILE_LINES:
                problems.append(f"{path}: {lines} lines, the limit is {MAX_FILE_LINES}")
            if path.suffix == ".py":
                problems += long_functions(path)
    print("\n".join(problems) or "lines: every file and function within its limit")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
