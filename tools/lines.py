"""Keep files and functions small: `python tools/lines.py` exits 1 and names what is over a limit.

It also names fragments: short files that one file beside them imports, and nobody else. They are no mistake where they
read better alone.

Functions that typer reads as commands are exempt from the limit of parameters: each of theirs is an option of the
command line. So is mindieclient, whose signatures are documented ones.
"""

import ast
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

MAX_FILE_LINES = 400
MAX_EXCEPTIONS = 10
EXCEPTIONS = {  # files over the limit, and why
    "src/ems/wire/messages.py": "all messages of the pool's wire are read together",
}
FRAGMENT_LINES = 60
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 5  # self and cls not counted
FOLDERS = ("src", "tests", "tools", "benches", "examples")
SUFFIXES = {".py", ".c", ".cpp", ".h", ".hpp", ".js", ".mjs"}
DOCUMENTED = Path("src/mindieclient")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(path: Path) -> Iterator[Function]:
    """Of a Python file, nested ones too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, Function):
            yield node


def long_functions(path: Path) -> list[str]:
    """Functions of a Python file that exceed the limit, docstring included."""
    found = []
    for node in functions(path):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > MAX_FUNCTION_LINES:
            found.append(f"{path}:{node.lineno}: {node.name} has {length} lines, the limit is {MAX_FUNCTION_LINES}")
    return found


def is_command(function: Function) -> bool:
    """Whether typer reads its parameters: some default is annotated with an option or an argument of typer's."""
    arguments = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return any("typer." in ast.unparse(each.annotation) for each in arguments if each.annotation)


def wide_functions(path: Path) -> list[str]:
    """Functions of a Python file with more parameters than the limit."""
    found = []
    for node in functions(path):
        names = [each.arg for each in node.args.posonlyargs + node.args.args + node.args.kwonlyargs]
        count = len([name for name in names if name not in ("self", "cls")])
        if count > MAX_PARAMETERS and not is_command(node):
            found.append(f"{path}:{node.lineno}: {node.name} has {count} parameters, the limit is {MAX_PARAMETERS}")
    return found


def fragments(paths: Collection[Path]) -> Iterator[str]:
    """Python files of `src` below FRAGMENT_LINES whose only importer, in `src`, lies in the same folder."""
    importers: dict[str, set[Path]] = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
            for name in names:
                importers.setdefault(name, set()).add(path)
    for path in paths:
        lines = len(path.read_text().splitlines())
        importer, *others = importers.get(".".join(path.with_suffix("").parts[1:]), {Path()})
        if lines < FRAGMENT_LINES and not others and importer.parent == path.parent:
            yield f"{path}: {lines} lines, a fragment of {importer.name}"


def main() -> int:
    problems: list[str] = []
    for folder in FOLDERS:
        for path in sorted(p for p in Path(folder).rglob("*") if p.suffix in SUFFIXES and "vendor" not in p.parts):
            lines = len(path.read_text().splitlines())
            if lines > MAX_FILE_LINES and str(path) not in EXCEPTIONS:
                problems.append(f"{path}: {lines} lines, the limit is {MAX_FILE_LINES}")
            if path.suffix == ".py":
                problems += long_functions(path)
            if path.suffix == ".py" and folder == "src" and not path.is_relative_to(DOCUMENTED):
                problems += wide_functions(path)
    if len(EXCEPTIONS) > MAX_EXCEPTIONS:
        problems.append(f"EXCEPTIONS: {len(EXCEPTIONS)} files, the limit is {MAX_EXCEPTIONS}")
    print(*fragments(sorted(Path("src").rglob("*.py"))), sep="\n")
    print("\n".join(problems) or "lines: every file and function within its limit")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
