"""Which layers of a model need the keys and values of a window's tokens only, and how far back their steps read. Pure.

These may have blocks of their own, which are free as soon as the window has passed them.
"""

from kvloom.checkpoints.families.spec import DecoderSpec

_KEYS_AT_ONCE = 128  # kChunkKeys of kernels/cpu/layout.hpp: keys are read so many at a time


def windowed(spec: DecoderSpec) -> frozenset[int]:
    """The layers with keys and values that only steps within a window read. None where tokens see those behind them,
    or where layers keep states besides, with which a prefix is found in another way.
    """
    if spec.sees_ahead or spec.state_floats:
        return frozenset()
    full = {_keys_of(index, mixer.keys_of) for index, mixer in spec.attention if mixer.window is None}
    return frozenset(index for index, _ in spec.cached if index not in full)


def reach_of(spec: DecoderSpec) -> int:
    """See RankInfo.reach: the widest window of these layers, plus what the kernels read with it; 0 = there are none."""
    found = windowed(spec)
    windows = [mixer.window or 0 for index, mixer in spec.attention if _keys_of(index, mixer.keys_of) in found]
    return max(windows) + _KEYS_AT_ONCE - 1 if windows else 0


def _keys_of(layer: int, other: int | None) -> int:
    """The layer whose keys and values a layer reads."""
    return layer if other is None else other
