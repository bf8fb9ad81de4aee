"""The calls of the serving adapters in use today, in their order, against our SDK.

They set `kvcache_type` after construction, pass `cc_config_v1=`, hash blocks with Python's signed `hash`, multiply
`success` by the block size, and open their circuit on any exception but EMS_INVALID_ARGUMENT.
"""

import numpy as np
import pytest
import torch

from ems import CcConfig_v1, CcKvOption, ContextCache_v1, Ems, EmsConfig, EmsErrorCode, EmsException
from ems.cc_v1.cc_config import KVCacheType
from tests.support.pool.agents import BLOCK_SIZE, running_agent

LEGACY_ID = "cc_kvstore@_@ds_default_ns_001"


class Adapter:
    """One rank's adapter: futures by request, a circuit that a health poll closes."""

    def __init__(self) -> None:
        config = CcConfig_v1(
            rank_id=0, device_id=0, model_id="deepseek-v3", tp_world_size=1, pp_world_size=1,
            rank_in_tp_group=0, rank_in_pp_group=0, llm_engine="vllm",
        )  # fmt: skip
        config.kvcache_type = KVCacheType.MLA
        Ems.init(EmsConfig(access_id=LEGACY_ID, access_key="", cc_config_v1=config))
        self.cc: ContextCache_v1 = Ems.get_cc()
        self.is_healthy = True
        self.loads, self.saves = {}, {}

    def hashes(self, tokens: list[int]) -> list[int]:
        found, previous = [], None
        for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            previous = hash((previous, *tokens[start : start + BLOCK_SIZE]))
            found.append(previous)
        return found

    def submit(self, table, call, request, hashes, block_ids) -> None:
        slots = (np.array(block_ids)[:, np.newaxis] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).ravel().tolist()
        option = CcKvOption(write_rcache=True, read_local_only=False, timeout=5000)
        future = None
        try:
            future = call(slot_mapping=slots, hashes=hashes, offsets=[BLOCK_SIZE] * len(block_ids), option=option)
        except EmsException as error:
            self.process(error)
        table[request] = future

    def finished(self, table) -> dict[str, int]:
        done = {}
        for request, future in list(table.items()):
            if future and not self.cc.is_ready(future):
                continue
            done[request] = 0
            try:
                if future:
                    done[request] = self.cc.get_result(future).success * BLOCK_SIZE
            except EmsException as error:
                self.process(error)
            del table[request]
        return done

    def process(self, error: EmsException) -> None:
        if error.status_code() != EmsErrorCode.EMS_INVALID_ARGUMENT:
            self.is_healthy = False

    def wait(self, table) -> dict[str, int]:
        done = {}
        while table:
            done |= self.finished(table)
        return done


@pytest.fixture
def kv():
    return [
        [torch.randn(64, BLOCK_SIZE, 1, 24).bfloat16(), torch.randn(64, BLOCK_SIZE, 1, 8).bfloat16()] for _ in range(3)
    ]


def test_the_adapters_calls_work_unchanged(monkeypatch, tmp_path, kv):
    socket = tmp_path / "ems.sock"
    monkeypatch.setenv("EMS_SOCKET", str(socket))
    with running_agent(socket=socket):
        adapter = Adapter()
        adapter.cc.register_kvcache(kv)
        prompts = {f"request-{i}": list(range(i, i + 33)) for i in range(4)}
        for i, (request, tokens) in enumerate(prompts.items()):
            adapter.submit(
                adapter.saves, adapter.cc.async_save, request, adapter.hashes(tokens), list(range(8 * i, 8 * i + 8))
            )
        assert adapter.wait(adapter.saves) == dict.fromkeys(prompts, 32)
        before = [[tensor[:32].clone() for tensor in layer] for layer in kv]
        for i, (request, tokens) in enumerate(prompts.items()):
            target = list(range(32 + 8 * i, 40 + 8 * i))
            adapter.submit(adapter.loads, adapter.cc.async_load, request, adapter.hashes(tokens), target)
        assert adapter.wait(adapter.loads) == dict.fromkeys(prompts, 32)
        for layer, saved in zip(kv, before, strict=True):
            assert all(torch.equal(now[32:], then) for now, then in zip(layer, saved, strict=True))
        cold = adapter.hashes(list(range(1000, 1032)))
        adapter.submit(adapter.loads, adapter.cc.async_load, "cold", cold, list(range(8)))
        assert adapter.wait(adapter.loads) == {"cold": 0}
        assert adapter.is_healthy, "a miss is no failure"
    adapter.submit(adapter.loads, adapter.cc.async_load, "late", cold, list(range(8)))
    assert adapter.wait(adapter.loads) == {"late": 0}
    assert not adapter.is_healthy
    assert Ems.check_health() is False
    with running_agent(socket=socket):
        assert Ems.check_health() is True
    Ems.shutdown()
