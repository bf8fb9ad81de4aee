"""npuDeviceIds on this machine: devices in torch's numbering, or shares of the CPU's cores."""

import os
from collections.abc import Sequence
from typing import Any


def device_settings(device_ids: Sequence[Sequence[int]], index: int, kind: str) -> dict[str, Any]:
    """EngineConfig's device_ids and rank_cores for model number `index`.

    A CPU has as many devices as the file names; each is an equal share of the cores, in the order of their numbers, and
    a single device has all of them. Where these are more devices than cores, as in files of larger machines, each model
    has one process on all cores, which `devices_note` says. Other devices are numbered among the visible ones
    (CUDA_VISIBLE_DEVICES, ASCEND_RT_VISIBLE_DEVICES), as in torch.
    """
    ids = tuple(device_ids[index if len(device_ids) > 1 else 0])
    if kind != "cpu":
        return {"device_ids": ids}
    named, cores = _named(device_ids), sorted(os.sched_getaffinity(0))
    if len(named) > len(cores):
        return {"world_size": 1}
    if len(named) == 1:
        return {}
    shares = [share_of(cores, named.index(device), len(named)) for device in ids]
    return {"device_ids": ids, "rank_cores": tuple(shares)}


def devices_note(device_ids: Sequence[Sequence[int]], kind: str) -> str:
    """A sentence for the log where the file names more devices than this machine has; "" = it does not."""
    num_named, num_cores = len(_named(device_ids)), len(os.sched_getaffinity(0))
    if kind != "cpu" or num_named <= num_cores:
        return ""
    return f"npuDeviceIds: names {num_named} devices, and this CPU has {num_cores} cores: each model has one process"


def _named(device_ids: Sequence[Sequence[int]]) -> list[int]:
    return sorted({device for ids in device_ids for device in ids})


def devices_of(value: list[Any]) -> list[list[int]]:
    """npuDeviceIds with a list for each model; a flat list, as in the tuning guide's table, is one model's."""
    return value if isinstance(value[0], list) else [value]


def share_of(cores: Sequence[int], device: int, num_devices: int) -> tuple[int, ...]:
    """The cores of one device, which are neighbours; the sizes of shares differ by at most one core."""
    first, after = (len(cores) * number // num_devices for number in (device, device + 1))
    return tuple(cores[first:after])
