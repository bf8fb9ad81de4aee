"""kvloom-ems, the SDK as its own wheel: it saves and loads in an environment with only numpy and xxhash."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.support.pool.agents import running_agent

ROOT = Path(__file__).resolve().parents[2]
CACHE = {name: os.environ[name] for name in ("PATH", "HOME", "XDG_CACHE_HOME") if name in os.environ}
BUILD = "import setuptools.build_meta as backend; backend.build_wheel('../out')"
USES = """
import sys
from pathlib import Path

import numpy as np

import ems
from ems import CcConfig, CcKvOption, CcResult, Ems, EmsConfig
import ems.integration.moving
from ems.native import library

assert Path(ems.__file__).is_relative_to(sys.prefix), ems.__file__
for name in ("kvloom", "torch", "msgspec"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise AssertionError(f"{name} is here")

class OthersTensor:
    def __init__(self, array):
        self.array = array
    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)
    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

Ems.init(EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="m")))
cc = Ems.get_cc()
kv = [[np.random.default_rng(i).random((8, 4, 2, 16), np.float32) for i in range(2)] for _layer in range(3)]
before = [[array.copy() for array in layer] for layer in kv]
cc.register_kvcache([[layer[0], OthersTensor(layer[1])] for layer in kv])
slots = list(range(16))
assert cc.save(slots, [1, 2, 3, 4], [4] * 4) == CcResult(4, 4)
for layer in kv:
    for array in layer:
        array[:] = 0
assert cc.exists([1, 2, 3, 4, 5]) == 4
assert cc.load(slots, [1, 2, 3, 4], [4] * 4, CcKvOption(timeout=5000)) == CcResult(4, 4)
for layer, old in zip(kv, before):
    for array, whole in zip(layer, old):
        assert (array[:4] == whole[:4]).all() and not array[4:].any()
assert cc.async_load(slots[:4], [3], [4]).result() == CcResult(1, 1)
assert (kv[0][1][0] == before[0][1][2]).all()
with ems.open_pool(EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="m")), "raw") as pool:
    assert pool.put(["a", b"b"], [b"1234", np.arange(4.0)]) == [ems.KvStatus.STORED] * 2
    target = np.zeros(4)
    assert pool.get([b"b", "c"], [target, bytearray(1)]) == [True, False]
    assert (target == np.arange(4.0)).all()
assert "torch" not in sys.modules
assert any(library._loaded.values()) == (sys.argv[1] == "native")
Ems.shutdown()
try:
    with ems.embedded():
        raise AssertionError("there is no agent in this environment")
except ems.EmsException as error:
    assert "is kvloom's, which is not installed here" in str(error), error
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy of the sources, so that the build leaves nothing in the tree."""
    copy = tmp_path_factory.mktemp("source")
    shutil.copytree(ROOT / "src" / "ems", copy / "src" / "ems", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "sdk", copy / "sdk", ignore=shutil.ignore_patterns("build"))
    done = subprocess.run([sys.executable, "-c", BUILD], cwd=copy / "sdk", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = (copy / "out").glob("*.whl")
    return path


def test_it_carries_the_same_code_for_every_platform_from_python_3_10(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    folder = ROOT / "src" / "ems"
    sources = {f"ems/{path.relative_to(folder)}" for kind in ("py", "cpp", "hpp") for path in folder.rglob(f"*.{kind}")}
    assert {name for name in names if name.startswith("ems/")} == sources
    assert any(name.endswith("licenses/LICENSE") for name in names)
    own, whole = (
        tomllib.loads((ROOT / name).read_text())["project"] for name in ("sdk/pyproject.toml", "pyproject.toml")
    )
    assert wheel.name == f"kvloom_ems-{whole['version']}-py3-none-any.whl"
    assert [each.partition(">")[0] for each in own["dependencies"]] == ["numpy", "xxhash"]
    assert own["requires-python"] == ">=3.10"


@pytest.mark.parametrize("has_compiler", [False, True], ids=["without a compiler", "with one"])
def test_it_saves_and_loads_with_numpy_and_xxhash_alone(wheel, tmp_path, has_compiler):
    """With a compiler, it uses the library that any program compiled from these sources before, or compiles it."""
    environment = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        str(wheel),
    ]
    subprocess.run(install, check=True, capture_output=True)
    (site,) = (environment / "lib").glob("python*/site-packages")
    for package in (np, xxhash):
        folder = Path(package.__file__).parent
        for found in (folder, folder.with_name(f"{folder.name}.libs")):
            if found.exists():
                (site / found.name).symlink_to(found)
    with running_agent() as agent:
        variables = {"EMS_SOCKET": str(agent.config.socket)}
        variables |= CACHE if has_compiler else {"PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = subprocess.run(
            [str(python), "-W", "error", "-c", USES, "native" if has_compiler else "python"],
            env=variables,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr[-3000:]
