"""npuDeviceIds on this machine: devices in torch's numbering, or shares of the CPU's cores."""

import os
from collections.abc import Sequence
from typing import Any

from kvloom.contract.errors import BadRequest


def device_settings(device_ids: Sequence[Sequence[int]], index: int, kind: str) -> dict[str, Any]:
    """EngineConfig's device_ids and rank_cores for model number `index`.

    A CPU has as many devices as the file names (the highest number plus 1); each is an equal share of the cores, in
    order, and a single device has all of them. Other devices are numbered among the visible ones (CUDA_VISIBLE_DEVICES,
    ASCEND_RT_VISIBLE_DEVICES), as in torch. Raises BadRequest when there are fewer cores than devices.
    """
    ids = tuple(device_ids[index if len(device_ids) > 1 else 0])
    num_devices = 1 + max(max(each) for each in device_ids)
    if kind != "cpu":
        return {"device_ids": ids}
    if num_devices == 1:
        return {}
    cores = sorted(os.sched_getaffinity(0))
    if num_devices > len(cores):
        most = f"the CPU's {len(cores)} cores make {len(cores)} at most, from 0 on"
        raise BadRequest("npuDeviceIds", f"names device {num_devices - 1}; {most}")
    shares = [share_of(cores, device, num_devices) for device in ids]
    return {"device_ids": ids, "rank_cores": tuple(shares)}


def share_of(cores: Sequence[int], device: int, num_devices: int) -> tuple[int, ...]:
    """The cores of one device, which are neighbours; the sizes of shares differ by at most one core."""
    first, after = (len(cores) * number // num_devices for number in (device, device + 1))
    return tuple(cores[first:after])
