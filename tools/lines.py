"""Keep files and functions small: `python tools/lines.py` exits 1 and names what is over a limit.

It also names fragments: short files that one file beside them imports, and nobody else. Those that are a subject of
their own stand in ALONE with that subject; a row there that names no fragment is told too.

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
ALONE = {  # fragments that are a subject of their own
    "src/ems/integration/vllm_stats.py": "subclasses of vLLM's interface for statistics, which its own tests stub",
    "src/kvloom/bench/hits.py": "reads a server's /metrics; the command line only prints",
    "src/kvloom/checkpoints/families/known/kimi_config.py": "one family's configuration, in both file formats",
    "src/kvloom/checkpoints/families/known/nemotron_config.py": "one family's configuration, in both file formats",
    "src/kvloom/checkpoints/families/multiplied.py": "a kind of tensor",
    "src/kvloom/checkpoints/families/picked.py": "a kind of tensor, with the layouts of files",
    "src/kvloom/checkpoints/quantized/bitsandbytes.py": "a format; each has its file",
    "src/kvloom/engine/hosted/resumable.py": "pure: what an answer may go on from",
    "src/kvloom/engine/limits.py": "pure: the scheduler's budget and pools",
    "src/kvloom/engine/schedule/known.py": "pure, every branch covered",
    "src/kvloom/engine_api/build.py": "a native library's sources and flags, which builds of wheels read",
    "src/kvloom/fleet/orphans.py": "Linux's adoption of processes",
    "src/kvloom/fleet/scaling.py": "pure: how many replicas",
    "src/kvloom/gewu/protocol/jsontext.py": "pure, every branch covered: limits of JSON from apps",
    "src/kvloom/gewu/worker/cpushare.py": "Linux's nice values and cores",
    "src/kvloom/pool/control/members.py": "pure: who is alive",
    "src/kvloom/pool/staging.py": "a budget with its own lock",
    "src/kvloom/rank/kernels/reference_latents.py": "a kind of attention of the reference, as reference_mixers.py",
    "src/kvloom/rank/kernels/rope_table.py": "a table in the kernels' layout",
    "src/kvloom/rank/tier/windows.py": "a kind of value in the outer KV tier, as states.py",
    "src/kvloom/server/chat/history.py": "pure: earlier reasoning, of which chat templates differ",
    "src/kvloom/server/chat/loose_calls.py": "pure: schemas held without a grammar",
    "src/kvloom/server/dialects/openai/generation_config.py": "a form of transformers",
    "src/kvloom/server/dialects/responses/calls.py": "an item with states of its own",
    "src/kvloom/server/http/unpacking.py": "a standard: gzip and deflate",
    "src/kvloom/tuning/gap.py": "pure: the proposal of one key",
    "src/kvloom/tuning/report.py": "text in, text out",
    "src/kvloom/vllm/one_kind.py": "a lock of kinds",
    "src/mindieclient/python/httpclient/stream.py": "a wire format; no socket",
}
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


def fragments(paths: Collection[Path]) -> dict[str, str]:
    """Python files of `src` below FRAGMENT_LINES whose only importer, in `src`, lies in the same folder, and what to
    say of each.
    """
    importers: dict[str, set[Path]] = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [each.name for each in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [str(node.module), *(f"{node.module}.{name}" for name in names)]
            for name in names:
                importers.setdefault(name, set()).add(path)
    found = {}
    for path in paths:
        lines = len(path.read_text().splitlines())
        importer, *others = importers.get(".".join(path.with_suffix("").parts[1:]), {Path()})
        if lines < FRAGMENT_LINES and not others and importer.parent == path.parent:
            found[str(path)] = f"{path}: {lines} lines, a fragment of {importer.name}"
    return found


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
    short = fragments(sorted(Path("src").rglob("*.py")))
    told = [text for path, text in short.items() if path not in ALONE]
    told += [f"ALONE: {path} is no fragment" for path in ALONE if path not in short]
    print("\n".join(told + problems) or "lines: every file and function within its limit")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
