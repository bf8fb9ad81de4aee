"""Cuts the slots of a batch into runs in one call."""

import numpy as np

from ems.native.functions import functions_at_hand
from ems.runs import Blocks, Numbers, address_of


def native_cut(slots: Numbers, counts: list[int], block_size: int, num_slots: int) -> Blocks | None:
    """The runs of each block, which has so many tokens; they have as many as there are slots.

    None without the library, and where a slot is not of the cache or named more than once: Python says which.
    """
    library = functions_at_hand()
    if library is None:
        return None
    tokens, num = np.array(counts, np.int64), len(slots)
    runs, edges = np.empty((num, 3), np.int64), np.empty(len(tokens) + 1, np.int64)
    slots = np.ascontiguousarray(slots)
    num_runs = library.ems_cut(
        address_of(slots),
        num,
        address_of(tokens),
        len(tokens),
        block_size,
        num_slots,
        address_of(runs),
        address_of(edges),
    )
    return Blocks(runs[:num_runs], edges) if num_runs >= 0 else None
