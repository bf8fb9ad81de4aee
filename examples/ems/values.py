"""Values under keys: an engine with its own cache layout keeps chunks in the pool. Needs no service and no root."""

import numpy as np

import ems
from ems import CcConfig, EmsConfig

NUM_CHUNKS, CHUNK_BYTES = 32, 256 << 10
CONFIG = EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="llama2-13b"))

if __name__ == "__main__":
    keys = [f"chunk {number}" for number in range(NUM_CHUNKS)]
    with ems.embedded("64M"), ems.open_pool(CONFIG, layout="float16, 256 tokens, NHD") as pool:
        host = np.random.default_rng(1).integers(0, 256, NUM_CHUNKS * CHUNK_BYTES, np.uint8)
        memory = pool.register(host)
        chunks = [memory[i * CHUNK_BYTES : (i + 1) * CHUNK_BYTES] for i in range(NUM_CHUNKS)]
        statuses = pool.put(keys[::2], chunks[::2])
        print("put", sum(status.is_success for status in statuses), "of", len(statuses), "chunks")

        before = host.copy()
        host[:] = 0
        future = pool.async_get(keys, chunks)
        found = future.result()
        for i, is_found in enumerate(found):
            part = slice(i * CHUNK_BYTES, (i + 1) * CHUNK_BYTES)
            assert (host[part] == (before[part] if is_found else 0)).all()
        print("got", sum(found), "of", len(found), "chunks; the others are untouched")
        print("of another length:", pool.exists(keys[:1], [CHUNK_BYTES - 1]))
