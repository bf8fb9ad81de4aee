"""Memory, pressure and power as the system reports them."""

import os
from pathlib import Path

from kvloom.gewu.service.memory import Readings
from kvloom.limits import memory_limit

_CPU_PRESSURE_PERCENT = 20.0
_LOW_BATTERY_PERCENT = 20
_THERMAL_MARGIN_MILLIKELVIN = 5000


def read_memory(psi_file: Path) -> Readings:
    """Memory now. Files that are absent or unreadable count as "no limit" and "no pressure"."""
    meminfo = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available, total = (int(meminfo[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    limit, used = memory_limit()
    stalls = _stalls(psi_file)
    return Readings(available, total, limit, used, stalls.get("some"), stalls.get("full"))


def measure_processes() -> dict[int, int]:
    """Bytes of this process and each child, by process id; shared pages are divided among their users.

    Takes milliseconds for processes of gigabytes, so not for an event loop.
    """
    tasks = Path("/proc/self/task")
    children = [int(pid) for task in _children(tasks) for pid in _text(task / "children").split()]
    return {pid: _process_bytes(Path("/proc") / str(pid)) for pid in (os.getpid(), *children)}


def _process_bytes(process: Path) -> int:
    """Proportional set size; the resident one where that cannot be read; 0 when the process is gone."""
    for line in _text(process / "smaps_rollup").splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    resident = _text(process / "statm").split()[1:2]
    return int(resident[0]) * os.sysconf("SC_PAGE_SIZE") if resident else 0


def is_power_short(psi_folder: Path, power: Path = Path("/sys/class/power_supply")) -> str | None:
    """Why BACKGROUND work should pause, or None: a busy processor, a low battery, heat."""
    if _cpu_pressure_percent(psi_folder / "cpu") > _CPU_PRESSURE_PERCENT:
        return "the processor is busy"
    if any(_is_low_battery(supply) for supply in _children(power)):
        return "the battery is low"
    if any(_is_hot(zone) for zone in _children(Path("/sys/class/thermal"))):
        return "the device is hot"
    return None


def _stalls(psi_file: Path) -> dict[str, int]:
    """{"some": microseconds, "full": ...} since boot."""
    found = {}
    for line in _text(psi_file).splitlines():
        words = line.split()
        totals = [word.removeprefix("total=") for word in words if word.startswith("total=")]
        if totals and totals[0].isdigit():
            found[words[0]] = int(totals[0])
    return found


def _cpu_pressure_percent(psi_file: Path) -> float:
    for word in _text(psi_file).partition("\n")[0].split():
        if word.startswith("avg10="):
            return float(word.removeprefix("avg10="))
    return 0.0


def _is_low_battery(supply: Path) -> bool:
    if _text(supply / "type").strip() != "Battery" or _text(supply / "status").strip() != "Discharging":
        return False
    capacity = _text(supply / "capacity").strip()
    return capacity.isdigit() and int(capacity) < _LOW_BATTERY_PERCENT


def _is_hot(zone: Path) -> bool:
    temperature = _text(zone / "temp").strip()
    for kind in zone.glob("trip_point_*_type"):
        trip = _text(kind.with_name(kind.name.replace("_type", "_temp"))).strip()
        if _text(kind).strip() == "passive" and trip.isdigit() and temperature.isdigit():
            return int(temperature) > int(trip) - _THERMAL_MARGIN_MILLIKELVIN
    return False


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if os.path.isdir(folder) else []


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
