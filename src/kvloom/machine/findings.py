"""Findings from a machine's facts: what they mean for serving on it. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from kvloom.machine.facts import BASE, EXTRAS, Facts
from kvloom.rank.kernels.build import ISAS, best_isa

Mark = Literal["ok", "slow", "MISS"]
_SMALL_BYTES = 512 << 20  # the demo model, its server and a little KV cache
_SMALL_SHM_BYTES = 64 << 20
_BUSY = 0.5  # load, as a share of the cores, above which the machine is busy
_SLOWER = {
    "avx2": "AVX-512 with VNNI and BF16 is not here; the AVX2 kernels are slower",
    "portable": "neither AVX-512 nor AVX2 is here; the portable kernels are much slower",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """`mark`: "slow" = works, but not as fast as it could; "MISS" = needed for serving, and missing."""

    mark: Mark
    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The back end that `kvloom serve` uses here, "" = none, and the reason."""

    backend: str
    why: str


def choose(facts: Facts) -> Choice:
    """The choice of "auto" for a model that the CPU kernels support."""
    isa = best_isa(facts.cpu_flags)
    others = " and ".join(
        f"{name} (--device {kind} --backend torch)"
        for name, kind, found in (("CUDA", "cuda", facts.cuda_devices), ("NPU", "npu", facts.npu_devices))
        if found
    )
    beside = f"; {others} must be asked for" if others else ""
    if isa in facts.kernels:
        return Choice("cpu", f"the kernels for {isa} are here ({facts.kernels[isa]}){beside}")
    if facts.compiler:
        return Choice("cpu", f"the kernels for {isa} will be compiled once, with {facts.compiler}{beside}")
    if "torch" in facts.packages:
        return Choice("reference", f"there are neither kernels for {isa} nor a C++ compiler, but torch is here{beside}")
    return Choice("", f"there are neither kernels for {isa} nor a C++ compiler, nor torch")


def findings(facts: Facts) -> list[Finding]:
    """The findings, in reading order."""
    return [
        *_processor(facts),
        *_memory(facts),
        *_backend(facts),
        *_keeping(facts),
        *_packages(facts),
    ]


def _processor(facts: Facts) -> Iterator[Finding]:
    isa = best_isa(facts.cpu_flags)
    name = f"{facts.cpu or 'unknown processor'}{', virtual' if facts.is_virtual else ''}"
    if isa in _SLOWER:
        missing = ", ".join(sorted(ISAS["avx512"][1] - facts.cpu_flags))
        yield Finding("slow", "instruction set", f"{name}: {_SLOWER[isa]}; missing: {missing}")
    else:
        yield Finding("ok", "instruction set", f"{name}: {isa}")
    usable, quota = facts.num_usable, facts.quota_cores
    if quota is not None and quota < usable:
        held = f"{usable} usable, but the control group has time for {quota:g} of them"
        yield Finding("slow", "cores", f"{held}: threads wait for the one that is held back; give it whole cores")
    else:
        yield Finding("ok", "cores", str(usable) if usable >= facts.num_cores else f"{usable} of {facts.num_cores}")
    if facts.load > _BUSY * usable:
        busy = f"programs want {facts.load:g} cores of {usable} already"
        yield Finding("slow", "load", f"{busy}: a step waits for the slowest of its threads")
    if facts.governor == "powersave":
        yield Finding("slow", "clock", 'the governor is "powersave"; "performance" keeps the clock up between steps')


def _memory(facts: Facts) -> Iterator[Finding]:
    available, limit = facts.available_bytes, facts.limit_bytes
    text = f"{_size(available)} of {_size(facts.memory_bytes)} available"
    if limit is not None:
        available = min(available, max(0, limit - facts.limit_used_bytes))
        text += f", {_size(limit)} for the control group, {_size(facts.limit_used_bytes)} of them used"
    if available < _SMALL_BYTES:
        yield Finding("MISS", "memory", f"{text}: the demo model alone takes some {_size(_SMALL_BYTES)}")
    else:
        yield Finding("ok", "memory", text)
    if facts.swap_bytes:
        yield Finding("ok", "swap", f"{_size(facts.swap_bytes)}; weights that are swapped out cost seconds a token")
    if facts.huge_pages in ("", "never"):
        how = "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding("slow", "huge pages", f"transparent huge pages are off: {how}")
    else:
        yield Finding("ok", "huge pages", f"transparent: {facts.huge_pages}")
    if facts.shm_bytes < _SMALL_SHM_BYTES:
        free = f"{_size(facts.shm_bytes)} free in /dev/shm"
        yield Finding("slow", "shared memory", f"{free}: too little for a KV pool (docker run --shm-size)")


def _backend(facts: Facts) -> Iterator[Finding]:
    choice = choose(facts)
    if not choice.backend:
        yield Finding("MISS", "back end", f"{choice.why}; install g++, a wheel that carries the kernels, or torch")
    else:
        yield Finding("ok" if choice.backend == "cpu" else "slow", "back end", f"{choice.backend}: {choice.why}")
    torch = facts.packages.get("torch")
    for name, devices in (("CUDA", facts.cuda_devices), ("NPU", facts.npu_devices)):
        count = f"{len(devices)} device{'s' if len(devices) > 1 else ''}"
        if devices and torch:
            yield Finding("ok", name, f"{count}, torch {torch}")
        elif devices:
            yield Finding("slow", name, f"{count}, but no torch, which drives them: pip install 'kvloom[torch]'")


def _keeping(facts: Facts) -> Iterator[Finding]:
    again = "every start packs the weights again"
    if facts.cache_problem:
        yield Finding("slow", "kept weights", f"{facts.cache or 'none'}: {facts.cache_problem}; {again}")
    elif not facts.cache:
        yield Finding("slow", "kept weights", f"turned off: {again}")
    else:
        free = f"{_size(facts.disk_free_bytes)} free there"
        yield Finding("ok", "kept weights", f"{_size(facts.cache_bytes)} in {facts.cache}, {free}")
    yield Finding("ok", "demo model", facts.demo_model or "not fetched yet (98 MB): kvloom pull")


def _packages(facts: Facts) -> Iterator[Finding]:
    yield Finding("ok", "versions", f"kvloom {facts.version}, Python {facts.python}, {facts.system}")
    missing = [name for name in BASE if name not in facts.packages]
    if missing:
        yield Finding("MISS", "packages", f"not installed: {', '.join(missing)}; install kvloom again")
    for title, names in (("packages", BASE), ("extras", EXTRAS)):
        there = [f"{name} {facts.packages[name]}" for name in names if name in facts.packages]
        yield Finding("ok", title, ", ".join(there) or "none")


def lines(found: list[Finding]) -> Iterator[str]:
    """A finding a line: mark, name, text."""
    for each in found:
        yield f"{each.mark:4} {each.name}: {each.text}"


def _size(num_bytes: int) -> str:
    if num_bytes >= 1 << 30:
        return f"{num_bytes / (1 << 30):.1f} GiB"
    return f"{num_bytes >> 20} MiB"
