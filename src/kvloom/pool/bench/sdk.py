"""SdkClient: one rank with a registered KV cache in host memory, on one agent."""

import secrets
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ems import CcConfig_v1, CcKvOption
from ems.buffer import RegisteredCache
from ems.context_caching import ContextCaching
from ems.keys import Identity, KeySpace
from ems.profiling import Profiler
from ems.transport import LinkPool
from kvloom.pool.cluster.placement import home

Bytes = npt.NDArray[np.uint8]
_DEADLINE_S = 60.0


class SdkClient:
    """A KV cache of `num_slices` slices of `num_keys` blocks; a block is one token and `fragments` pieces of memory."""

    def __init__(self, path: Path, block_bytes: int, num_keys: int, num_slices: int, fragments: int = 1) -> None:
        self._num_keys = num_keys
        shape = (fragments, num_slices * num_keys, 1, 1, block_bytes // fragments)
        self.ring: Bytes = np.random.default_rng(block_bytes).integers(0, 256, shape, np.uint8)
        self._parts: list[Bytes] = list(self.ring)
        kvcache = [[part] for part in self._parts]
        self._layout = RegisteredCache(kvcache).layout
        self._links = LinkPool(lambda _deadline_s: path, "", "")
        config = CcConfig_v1(rank_id=0, device_id=0, model_id="bench")
        self._profiler = Profiler()
        self.caching = ContextCaching(self._links, config, self._profiler)
        self.caching.register_kvcache(kvcache)

    def new_hashes(self) -> list[int]:
        return [secrets.randbits(64) for _ in range(self._num_keys)]

    def hashes_at(self, node_id: str, node_ids: tuple[str, ...]) -> list[int]:
        """New hashes of blocks whose home is that node."""
        with self._links.lend(time.monotonic() + _DEADLINE_S) as link:
            salt = link.welcome.key_salt
        keys = KeySpace(salt, Identity("bench", "vllm", "MHA", 1, 1, 0, 0), self._layout)
        hashes: list[int] = []
        while len(hashes) < self._num_keys:
            value = secrets.randbits(64)
            if home(keys.of_hash(value, 1), node_ids) == node_id:
                hashes.append(value)
        return hashes

    def _slots(self, part: int) -> list[int]:
        return list(range(part * self._num_keys, (part + 1) * self._num_keys))

    def save(self, part: int, hashes: list[int]) -> None:
        """Saves a slice under these hashes; all blocks must be taken."""
        done = self.caching.save(self._slots(part), hashes, [1] * len(hashes), _option())
        assert done.success == len(hashes), f"{done.success} of {len(hashes)} blocks were stored"

    def load(self, part: int, hashes: list[int]) -> None:
        """Loads into a slice; all blocks must be there."""
        found = self.try_load(part, hashes)
        assert found == len(hashes), f"{found} of {len(hashes)} blocks were found"

    def try_load(self, part: int, hashes: list[int]) -> int:
        """Loads into a slice; how many blocks were there."""
        slots = self._slots(part)[: len(hashes)]
        return self.caching.load(slots, hashes, [1] * len(hashes), _option()).success

    def slice(self, part: int, fragment: int = 0) -> Bytes:
        """A slice's memory in one fragment, [num_keys * bytes of a fragment], writable."""
        first = part * self._num_keys
        return self._parts[fragment][first : first + self._num_keys].reshape(-1)

    def is_same(self, one: int, two: int) -> bool:
        """Whether two slices hold the same bytes."""
        return all(np.array_equal(self.slice(one, i), self.slice(two, i)) for i in range(len(self._parts)))

    def close(self) -> None:
        self.caching.close()
        self._links.close()
        self._profiler.close()


def _option() -> CcKvOption:
    """Generous timeout: a bench measures how long a call took, even on a busy machine."""
    return CcKvOption(timeout=int(_DEADLINE_S * 1000))
