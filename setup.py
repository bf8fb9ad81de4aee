"""The one step that pyproject.toml cannot say: a wheel carries libqos.so, compiled where the wheel is built."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

GEWU = Path("src/kvloom/gewu")


class BuildWithLibrary(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            compile_library = runpy.run_path(str(GEWU / "build.py"))["compile_library"]
            compile_library(Path(self.build_lib) / "kvloom" / "gewu" / "lib" / "libqos.so")


class PlatformWheel(bdist_wheel):
    """For any Python 3 of this platform: the library needs libc only."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(cmdclass={"build_py": BuildWithLibrary, "bdist_wheel": PlatformWheel})
