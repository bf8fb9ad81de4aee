"""Save and load in the background under token semantics; first a full prefix, then tokens that a mask selects."""

import numpy as np

import ems
from ems import CcConfig, Ems, EmsConfig, EmsException

TOKENS = [101, 102, 103, 104, 105, 106]


def main() -> None:
    draw = np.random.default_rng()
    kvcache = [[draw.random((8, 4, 2, 8), np.float32) for _ in range(2)] for _ in range(2)]  # host memory, no torch
    with ems.embedded(pool="64M"):
        Ems.init(EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="llama2-13b")))
        cc = Ems.get_cc()
        assert cc is not None
        cc.register_kvcache(kvcache)
        slots = list(range(6))
        future = cc.async_save(slot_mapping=slots, token_ids=TOKENS)
        print("done already" if cc.is_ready(future) else "under way")
        print("saved", cc.get_result(future))  # two blocks: one of 4 tokens and a tail of 2

        futures = [
            cc.async_load(slot_mapping=slots, token_ids=TOKENS),
            cc.async_load(slot_mapping=slots, token_ids=TOKENS, mask=[0, 0, 0, 0, 1, 1]),
        ]
        print("loaded", [future.result() for future in futures])
        try:
            cc.load(slot_mapping=slots, tonken_ids=TOKENS)
        except EmsException as error:
            print(error.status_code().name, "-", error.message())


if __name__ == "__main__":
    main()
