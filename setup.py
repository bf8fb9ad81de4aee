"""The one step that pyproject.toml cannot say: a wheel carries its native libraries, compiled where it is built."""

import runpy
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

SOURCE = Path(__file__).parent / "src"


class BuildWithLibraries(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib) / "kvloom"
            sys.path.insert(0, str(SOURCE))
            for package in ("gewu", "engine_api"):
                library = runpy.run_path(str(SOURCE / "kvloom" / package / "build.py"))["LIBRARY"]
                library.compile(target / package / library.prebuilt)
            native = runpy.run_path(str(SOURCE / "ems/native/build.py"))
            for library in (
                native["BLOCKS"],
                native["Library"]("libkvloom_pool", SOURCE / "kvloom/pool/storage/native"),
                native["Library"]("libkvloom_stream", SOURCE / "kvloom/pool/cluster/native"),
            ):
                library.compile(target.parent / library.prebuilt.relative_to(SOURCE))
            kernels = target / "rank/kernels/lib"
            shutil.rmtree(kernels, ignore_errors=True)  # a build folder may hold those of other sources
            runpy.run_path(str(SOURCE / "kvloom/rank/kernels/build.py"))["prebuild"](kernels)


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """For any Python 3 of this platform: the libraries need libc and libstdc++ only."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(distclass=NativeDistribution, cmdclass={"build_py": BuildWithLibraries, "bdist_wheel": PlatformWheel})
