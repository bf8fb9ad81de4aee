"""The CPU kernels' library: shipped in the wheel, or compiled once into the user's cache."""

import contextlib
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ems.common.folders import cache_folder
from ems.native.build import compile_once, is_whole, publish, reason_of_compiler
from kvloom.contract.errors import ModelError

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"  # in subfolders; they include one another by their path from here
PREBUILT = Path(__file__).parent / "lib"  # exists only in an installed wheel
_LONG = ("linear/way.cpp", "attention/heads.cpp")  # each takes a quarter of the whole time
COMMON_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-fno-math-errno")
_AVX512 = "avx512f avx512bw avx512vl avx512dq avx512vnni avx512bf16 avx2 fma f16c"

_AVX512_FLAGS = tuple(f"-m{flag}" for flag in _AVX512.split())
_AVX512_NEEDED = frozenset(_AVX512.replace("512vnni", "512_vnni").replace("512bf16", "512_bf16").split())
TILES = "amx"  # AVX-512 and the tile unit of Intel's processors
PAIRS = "avx512-pairs"  # AVX-512 with bf16 dot products as fast as fused multiply-adds: AMD's processors since Zen 4
_OF_AMD = "clzero"  # a flag of AMD's processors only; Intel's start such a product only every other cycle

# Best first: the compiler's flags, and what /proc/cpuinfo must name.
ISAS: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    TILES: (_AVX512_FLAGS, _AVX512_NEEDED | {"amx_tile", "amx_int8"}),
    PAIRS: (_AVX512_FLAGS, _AVX512_NEEDED | {_OF_AMD}),
    "avx512": (_AVX512_FLAGS, _AVX512_NEEDED),
    "avx2": (("-mavx2", "-mfma", "-mf16c"), frozenset({"avx2", "fma", "f16c"})),
    # keep loops over 16 lanes as loops, which the compiler vectorises: unrolled first, they are twice as slow
    "portable": (("-DKVL_PORTABLE", "--param=max-completely-peel-times=8"), frozenset()),
}


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction set flags of this machine; empty where the file does not exist."""
    if not cpuinfo.exists():
        return frozenset()
    lines = (line for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
    return frozenset(next(lines, "").partition(":")[2].split())


def best_isa(flags: frozenset[str]) -> str:
    return next(isa for isa, (_, needed) in ISAS.items() if needed <= flags)


def library(isa: str | None = None) -> Path:
    """Path of the library for `isa` (None = the best that this machine runs). Raises ModelError when there is none.

    Its name contains a hash of sources and flags, so an updated program never loads an old library.
    """
    flags = cpu_flags()
    isa = isa or best_isa(flags)
    if isa not in ISAS:
        raise ModelError(f"instruction set {isa}: known are {', '.join(ISAS)}")
    if missing := ISAS[isa][1] - flags:
        raise ModelError(f"instruction set {isa}: this machine lacks {', '.join(sorted(missing))}")
    path = found(isa)
    if path is None:
        path = _cache_root() / file_name(isa)
        try:
            compile_once(path, _library(isa), lambda target: compile_library(isa, target))
        except OSError as error:
            advice = "set XDG_CACHE_HOME to a folder that can be written"
            raise ModelError(f"the CPU kernels are not compiled: {path.parent}: {error.strerror}; {advice}") from None
    return path


def found(isa: str) -> Path | None:
    """The existing library for `isa`, from the wheel or compiled before; None when it must be compiled."""
    name = file_name(isa)
    if (path := PREBUILT / name).exists():
        return path
    with contextlib.suppress(ModelError):
        path = _cache_root() / name
    return path if is_whole(path) else None


def _library(isa: str) -> str:
    """The first instruction set that shares this one's library."""
    return "avx512" if isa in (TILES, PAIRS) else isa


def sums_of(isa: str) -> str:
    """The first instruction set that adds in the same order. Instruction sets with the same answer compute the same
    bits.
    """
    return "avx512" if isa == TILES else isa


def file_name(isa: str) -> str:
    hashed = hashlib.sha256(repr((COMMON_FLAGS, ISAS[isa][0])).encode())
    for path in sorted(SOURCES.rglob("*.[hc]*")):
        hashed.update(path.read_bytes())
    return f"libkvloom_{_library(isa)}_{platform.machine()}-{hashed.hexdigest()[:16]}.so"


def prebuild(folder: Path) -> None:
    """Compile every variant for this kind of machine into `folder`, for a wheel."""
    isas = ISAS if platform.machine() in ("x86_64", "AMD64") else ("portable",)
    for name, isa in {file_name(isa): isa for isa in isas}.items():
        compile_library(isa, folder / name)


def compile_library(isa: str, target: Path) -> None:
    """Compiles in a temporary folder, as many sources at once as there are cores, then renames the linked library: no
    half-written library is ever visible, and two builders do not collide.

    Raises ModelError when there is no compiler, or with its messages.
    """
    compiler = find_compiler()
    if compiler is None:
        raise ModelError("the CPU kernels need a C++ compiler (g++ or clang++) once, and none was found")
    log.warning("compiling the CPU kernels (%s) into %s, once; it takes up to a minute", _library(isa), target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    command: list[str | Path] = [compiler, *COMMON_FLAGS, *ISAS[isa][0], f"-I{SOURCES}"]
    num_cores = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor(num_cores) as side_by_side:
        each, objects = [], []
        for number, sources in enumerate(_units()):
            unit = Path(folder) / f"unit{number}-{target.name}.cpp"
            unit.write_text("".join(f'#include "{source}"\n' for source in sources))
            objects.append(unit.with_suffix(".o"))
            each.append([*command, "-c", unit, "-o", objects[-1]])
        for done in [side_by_side.submit(_run_compiler, words) for words in each]:
            done.result()
        built = Path(folder) / target.name
        _run_compiler([*command, *objects, "-o", built])
        publish(built, target)


def _units() -> list[list[str]]:
    """The sources that are compiled together, as paths below SOURCES; what takes longest comes first.

    Small sources take a third of their time for the headers that they share.
    """
    sources = [str(path.relative_to(SOURCES)) for path in sorted(SOURCES.rglob("*.cpp"))]
    small = [source for source in sources if source not in _LONG]
    units = [*([source] for source in _LONG if source in sources), small[::2], small[1::2]]
    return [unit for unit in units if unit]


def _run_compiler(words: Sequence[str | Path]) -> None:
    result = subprocess.run(words, capture_output=True, text=True, check=False)
    if result.returncode:
        raise ModelError(f"the CPU kernels do not compile with {words[0]}: {reason_of_compiler(result.stderr)}")


def find_compiler() -> str | None:
    """Path of a C++ compiler: $CXX, else g++, c++ or clang++."""
    return shutil.which(os.environ.get("CXX", "g++")) or shutil.which("c++") or shutil.which("clang++")


def _cache_root() -> Path:
    """The folder of what was compiled here. Raises ModelError for a user without a cache."""
    try:
        return cache_folder() / "kernels"
    except OSError as error:
        raise ModelError(f"the CPU kernels are not compiled: {error.filename}: {error.strerror}") from None
