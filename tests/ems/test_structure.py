"""The pure modules import nothing with side effects; the agent runs without torch; the SDK imports no kvloom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
ACTING = {"torch", "asyncio", "threading", "socket", "time", "os", "subprocess"}
PURE = [
    "ems/keys.py",
    "ems/common/breaker.py",
    "ems/wire/messages.py",
    "ems/wire/packing.py",
    "ems/wire/frames.py",
    "kvloom/pool/storage/allocator.py",
    "kvloom/pool/storage/evict.py",
    "kvloom/pool/cluster/placement.py",
]


def imported(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
    return found


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_import_pure_modules(name):
    modules = imported(SOURCE / name)
    assert not {module.split(".")[0] for module in modules} & ACTING
    own = {module for module in modules if module.startswith(("ems", "kvloom"))}
    assert {module.replace(".", "/") + ".py" for module in own} <= set(PURE)


def test_the_sdk_sees_nothing_of_the_service():
    for path in (SOURCE / "ems").rglob("*.py"):
        assert not {module for module in imported(path) if module.startswith("kvloom")}


def test_the_agent_loads_no_torch():
    code = "import sys, kvloom.pool.agent; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
