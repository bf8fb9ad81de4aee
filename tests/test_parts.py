"""Parts that are used without the others import no more than docs/install.md allows."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ONLY = """
import importlib, sys
part, *allowed = sys.argv[1:]

class Only:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in allowed and top not in sys.stdlib_module_names:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Only())
for name in part.split("+"):
    importlib.import_module(name)
"""
HTTPX = ("httpx", "httpcore", "h11", "anyio", "certifi", "idna")
PARTS = {
    "mindieclient": ("mindieclient.python.httpclient+mindieclient.httpclient", ("mindieclient", "numpy", *HTTPX)),
    "ems": ("ems.ems+ems.context_caching", ("ems", "numpy", "xxhash")),
    "kvloom.gewu": ("kvloom.gewu.session", ("kvloom", "ems", "msgspec")),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_what_it_needs_and_nothing_else(part):
    modules, allowed = PARTS[part]
    command = [sys.executable, "-c", ONLY, modules, *allowed]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("part", PARTS)
def test_the_documents_say_what_a_part_needs(part):
    row = re.search(rf"^\| `{re.escape(part)}` \|(.*)$", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    assert row is not None
    _, allowed = PARTS[part]
    for name in set(allowed) - {part.partition(".")[0], *HTTPX[1:]}:
        assert f"`{name}`" in row[1]


def test_every_dependency_and_every_extra_has_a_line_that_says_why():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docs/install.md").read_text()
    rows = {name for row in text.splitlines() if row.startswith("| `") for name in re.findall(r"`([^`]+)`", row)}
    needed = {re.split(r"[>=;\[]", each)[0] for each in project["dependencies"]}
    extras = {f"kvloom[{name}]" for name in project["optional-dependencies"] if name not in ("test", "dev")}
    assert needed | extras <= rows


LOADED = """
import importlib, sys
importlib.import_module(sys.argv[1])
print(*sorted(name for name in sys.argv[2:] if name in sys.modules))
"""
HEAVY = (
    "torch",
    "numpy",
    "llguidance",
    "cryptography",
    "rich",
    "httpx",
    "jinja2",
    "tokenizers",
    "starlette",
    "uvicorn",
)


@pytest.mark.parametrize(
    ("module", "loaded"),
    [
        ("kvloom.cli", ""),
        ("kvloom.server.run.cli", ""),
        ("kvloom.gewu.service.daemon", ""),
        ("kvloom.gewu.prober.main", ""),
        ("kvloom.machine.cli", ""),
    ],
)
def test_what_somebody_waits_for_loads_no_library_that_it_does_not_use_yet(module, loaded):
    command = [sys.executable, "-c", LOADED, module, *HEAVY]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == loaded
