"""Save the KV cache of a prefix and load it elsewhere. The example starts a private pool and needs no service."""

import numpy as np

import ems
from ems import CcConfig, CcKvOption, Ems, EmsConfig

LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE = 2, 8, 4, 2, 4


def main() -> None:
    shape = (BLOCKS, BLOCK_SIZE, HEADS, HEAD_SIZE)
    dice = np.random.default_rng(0)
    kvcache = [[dice.standard_normal(shape).astype(np.float16) for _ in range(2)] for _ in range(LAYERS)]
    with ems.embedded(pool="64M"):
        Ems.init(EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="llama2-13b")))
        cc = Ems.get_cc()
        assert cc is not None
        cc.register_kvcache(kvcache)

        option = CcKvOption(timeout=5000)
        saved = cc.save([0, 1, 2, 3, 4, 5, 6, 7], [0xABCD, -0x1234], [4, 4], option)
        loaded = cc.load(list(range(16, 24)), [0xABCD, -0x1234], [4, 4], option)
        print(f"saved {saved.success} of {saved.total} blocks, loaded {loaded.success}")
        assert all(np.array_equal(tensor[4:6], tensor[0:2]) for layer in kvcache for tensor in layer)

        missed = cc.load([0, 1, 2, 3], [0x9999], [4])
        print(f"an unknown block: {missed.success} of {missed.total}")


if __name__ == "__main__":
    main()
