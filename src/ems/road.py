"""Which road a call of the SDK takes. The choices are made here; those who carry calls out ask.

Whole: C++ goes from the caller's lists to the result in one step; saves, loads and lookups by hashes, of host tensors
without layer groups, over a connection that exists. Planned: Python names the blocks and finds them, and one call in
C++ moves them; all else that lies in host memory. Python: tensors of a device, and everything without the library.
"""

import numpy as np

from ems.blocks import Cache, Request
from ems.buffer import RegisteredCache, Snapshot
from ems.keys import KEY_BYTES
from ems.native.calls import NativeCalls
from ems.native.functions import Plan
from ems.native.line import FIRST_BYTES, REGION_BYTES, REGIONS
from ems.native.tensors import NativeHostTensors, plan_of_values
from ems.transport import Link, LinkPool


def whole(links: LinkPool, salt: bytes, cache: Cache | None) -> tuple[Link, NativeCalls] | None:
    """An idle link and its calls in one step; None where another road is taken. cache: what is registered, under the
    tenant's `salt`. The caller gives the link back.
    """
    planner = cache.planner if cache is not None else None
    link = links.take_idle() if planner is not None else None
    if planner is None or link is None:
        return None
    calls = link.calls(planner, (REGION_BYTES, REGIONS, FIRST_BYTES)) if link.welcome.key_salt == salt else None
    if calls is None:
        links.give_back(link)
        return None
    return link, calls


def is_planned(link: Link) -> bool:
    """Whether C++ moves what lies in host memory."""
    return link.is_native


def planned(link: Link, request: Request | Plan, source: RegisteredCache | Snapshot, sizes: list[int]) -> Plan | None:
    """The first blocks of a request for C++, as many as there are sizes; None where Python moves them."""
    if isinstance(request, Plan) or not is_planned(link):
        return request if isinstance(request, Plan) else None
    if isinstance(source, Snapshot):
        keys = request.keys(0, len(sizes))
        names = [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]
        return plan_of_values([[copy] for copy in source.copies], sizes, names, range(len(sizes)))
    if isinstance(source.tensors, NativeHostTensors):
        return source.tensors.plan_of(request.blocks, request.keys(0, len(sizes)), np.array(sizes, np.int64))
    return None
