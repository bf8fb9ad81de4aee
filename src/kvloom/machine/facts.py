"""Facts about a machine, as Linux reports them. Unknown ones are None, 0 or empty; nothing is judged here."""

import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from kvloom.checkpoints.demo_models import MODELS, pulled
from kvloom.contract.errors import ModelError, UserError
from kvloom.limits import control_groups, memory_limit
from kvloom.mistakes import problem_of
from kvloom.rank.kernels import build
from kvloom.rank.kernels.kept import kept_weights

BASE = (  # packages needed for serving on the CPU; docs/install.md has the reasons
    *("numpy", "gguf", "tokenizers", "jinja2", "starlette", "uvicorn", "uvloop", "httptools", "msgspec"),
    *("typer", "rich", "prometheus-client", "cryptography", "pyopenssl", "xxhash", "llguidance"),
    *("httpx", "httpcore", "jiter"),
)
EXTRAS = (
    *("torch", "diffusers", "valkey", "mooncake-transfer-engine-non-cuda", "opentelemetry-sdk", "pyarrow"),
    "matplotlib",
)


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts in bytes, numbers of cores, and texts as the system spells them."""

    version: str = ""  # of kvloom
    python: str = ""
    system: str = ""  # kernel and C library
    architecture: str = ""
    cpu: str = ""  # the processor's name
    cpu_flags: frozenset[str] = frozenset()
    is_virtual: bool = False
    num_cores: int = 0  # of the machine
    num_usable: int = 0  # cores that this process may use
    quota_cores: float | None = None  # quota of its control group
    load: float = 0.0  # mean number of runnable processes in the last minute
    governor: str = ""
    memory_bytes: int = 0
    available_bytes: int = 0
    swap_bytes: int = 0
    limit_bytes: int | None = None  # memory limit of its control group
    limit_used_bytes: int = 0
    huge_pages: str = ""  # always, madvise or never
    shm_bytes: int = 0  # free shared memory
    cuda_devices: tuple[str, ...] = ()
    npu_devices: tuple[str, ...] = ()
    compiler: str = ""  # the C++ compiler
    kernels: Mapping[str, str] = field(default_factory=dict)  # instruction set -> its library, if there is one
    cache: str = ""  # folder of packed weights; "" = off
    cache_problem: str = ""
    cache_bytes: int = 0
    disk_free_bytes: int = 0
    demo_model: str = ""  # the demo model's file
    packages: Mapping[str, str] = field(default_factory=dict)  # name -> version of installed packages


def read_facts(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> Facts:
    """The facts of this machine. `root` stands for /, below which proc, sys and dev are read."""
    meminfo = _pairs(_text(root / "proc/meminfo"))
    cpuinfo = _pairs(_text(root / "proc/cpuinfo").partition("\n\n")[0])
    flags = build.cpu_flags(root / "proc/cpuinfo")
    limit, used = memory_limit(root)
    cache, problem, cache_bytes, free = _cache(environ)
    return Facts(
        version=_versions(("kvloom",)).get("kvloom", ""),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()}, {' '.join(platform.libc_ver()) or 'unknown C library'}",
        architecture=platform.machine(),
        cpu=cpuinfo.get("model name", ""),
        cpu_flags=flags,
        is_virtual="hypervisor" in flags,
        num_cores=_text(root / "proc/cpuinfo").count("processor\t"),
        num_usable=len(os.sched_getaffinity(0)),
        quota_cores=_quota(root),
        load=float((_text(root / "proc/loadavg").split() or ["0"])[0]),
        governor=_text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor").strip(),
        memory_bytes=_kib(meminfo, "MemTotal"),
        available_bytes=_kib(meminfo, "MemAvailable"),
        swap_bytes=_kib(meminfo, "SwapTotal"),
        limit_bytes=limit,
        limit_used_bytes=used,
        huge_pages=_chosen(_text(root / "sys/kernel/mm/transparent_hugepage/enabled")),
        shm_bytes=_free(root / "dev/shm"),
        cuda_devices=_names(root / "proc/driver/nvidia/gpus"),
        npu_devices=tuple(name for name in _names(root / "dev") if name.startswith("davinci") and name[7:].isdigit()),
        compiler=build.find_compiler() or "",
        kernels={isa: str(path) for isa in build.ISAS if (path := build.found(isa)) is not None},
        cache=cache,
        cache_problem=problem,
        cache_bytes=cache_bytes,
        disk_free_bytes=free,
        demo_model=_demo_model(),
        packages=_versions((*BASE, *EXTRAS)),
    )


def _demo_model() -> str:
    try:
        return next((str(path) for name in MODELS if (path := pulled(name)) is not None), "")
    except ModelError:
        return ""


def _cache(environ: Mapping[str, str]) -> tuple[str, str, int, int]:
    """Folder of packed weights, its problem, its bytes, and its disk's free bytes."""
    try:
        kept = kept_weights(environ)
    except (UserError, OSError) as error:
        return "", problem_of(error) or str(error), 0, 0
    if kept is None:
        return "", "", 0, 0
    there = next(folder for folder in (kept.folder, *kept.folder.parents) if folder.exists())
    try:
        held = sum(entry.num_bytes for entry in kept.entries())
    except OSError as error:
        return str(kept.folder), error.strerror or str(error), 0, _free(there)
    problem = "" if os.access(there, os.W_OK) else "it cannot be written to"
    return str(kept.folder), problem, held, _free(there)


def _versions(names: tuple[str, ...]) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _quota(root: Path) -> float | None:
    """Cores that the control group (version 2 or 1) may use; the smallest quota of it and its parents."""
    found = []
    for group in control_groups(root, ""):
        limit, _, period = _text(group / "cpu.max").partition(" ")
        found.append((limit, period))
    for group in control_groups(root, "cpu"):
        found.append((_text(group / "cpu.cfs_quota_us"), _text(group / "cpu.cfs_period_us")))
    cores = [int(limit) / int(period) for limit, period in found if limit.strip().isdigit() and int(period or 0)]
    return min(cores, default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _names(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(os.listdir(folder)))
    except OSError:
        return ()


def _pairs(text: str) -> dict[str, str]:
    lines = (line.partition(":") for line in text.splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}


def _kib(pairs: Mapping[str, str], name: str) -> int:
    number = pairs.get(name, "").partition(" ")[0]
    return int(number) << 10 if number.isdigit() else 0


def _chosen(text: str) -> str:
    """The option in brackets: madvise of "always [madvise] never"."""
    return text.partition("[")[2].partition("]")[0]


def _free(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
