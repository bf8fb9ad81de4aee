"""Cosines and sines of every position, in the layout of the CPU kernels."""

import numpy as np

from kvloom.checkpoints.families.mixers import Rope
from kvloom.rank.kernels.backend import Floats


def rope_table(rope: Rope, positions: int, first: int = 0) -> Floats:
    """[positions, dim] float32: cosines, then sines, of float32 angles, from position `first` on. Rounded once, so the
    same on all machines.
    """
    angles = np.outer(np.arange(first, first + positions, dtype=np.float32), np.array(rope.inv_freq, np.float32))
    table = np.empty((positions, 2 * angles.shape[1]), np.float32)
    for part, of in zip(np.split(table, 2, axis=1), (np.cos, np.sin), strict=True):
        part[:] = of(angles, dtype=np.float64)
    return table * np.float32(rope.attention_factor)
