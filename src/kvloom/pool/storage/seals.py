"""Seals: how a block that left this process proves, when it comes back, that it is the block that was asked for.

A checksum shows that bytes are whole, not whose they are. A seal is the checksum XOR the first half of the block's key,
which is a hash of tenant, model, layout and contents (`ems.keys`). Bytes under another key therefore never match. The
function is its own inverse: it makes seals of checksums, and checksums of seals.
"""

import numpy as np

from ems.keys import KEY_BYTES
from ems.wire.messages import SUM_BYTES


def sealed(keys: bytes, sums: bytes) -> bytes:
    """The seals of packed checksums, or the checksums of packed seals. keys: 32 bytes each, sums: 16 bytes each."""
    names = np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES)[:, :SUM_BYTES]
    return (names ^ np.frombuffer(sums, np.uint8).reshape(-1, SUM_BYTES)).tobytes()
