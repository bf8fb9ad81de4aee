"""Run by an interpreter with vLLM: its tiering over EMS, made by its factory. Argument: the agent's socket."""

import sys
import time
from types import SimpleNamespace

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.tiering.base import SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

CHUNKS, BYTES = 16, 8192


def spec(**changes: object) -> SimpleNamespace:
    parallel = {"tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1, "world_size": 1}
    config = {
        "model": SimpleNamespace(name="org/model", dtype="bfloat16"),
        "cache": SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=4),
        "groups": (SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("a", "b")),),
        "parallel": SimpleNamespace(**parallel),
        "worker_kv_bytes_per_block": BYTES // 4,
        "replicated_layout": False,
        "canonical_layout": False,
        "kv_cache_layout": None,
    }
    return SimpleNamespace(config=SimpleNamespace(**{**config, **changes}))


def tier(socket: str, memory: np.ndarray, **changes: object) -> SecondaryTierManager:
    settings = {"type": "EmsTier", "module_path": "ems.integration.vllm_tier", "socket": socket, "timeout_ms": 5000}
    return SecondaryTierFactory.create_secondary_tier(
        {**settings, **changes.pop("settings", {})}, memoryview(memory), spec(**changes)
    )


def keys_of(*numbers: int) -> list[bytes]:
    return [make_offload_key(bytes([number]) * 32, 0) for number in numbers]


def finish(of: SecondaryTierManager) -> list[object]:
    deadline_s = time.monotonic() + 20
    while not (done := of.get_finished_jobs()):
        assert of.has_pending_work()
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    assert not of.has_pending_work()
    return done


def looked_up(of: SecondaryTierManager, keys: list[bytes], request: str) -> list[LookupResult]:
    context = ReqContext(req_id=request)
    of.on_new_request(context)
    deadline_s = time.monotonic() + 20
    while LookupResult.RETRY in (found := [of.lookup(key, context) for key in keys]):
        of.on_schedule_end(SimpleNamespace())
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    return found


def job(number: int, keys: list[bytes], chunks: list[int], is_load: bool) -> TransferJob:
    return TransferJob(number, keys, np.array(chunks, np.int32), is_load, ReqContext(req_id="r"))


def chunks_travel(socket: str) -> None:
    dice = np.random.default_rng(1)
    mine, theirs = (dice.integers(0, 255, (CHUNKS, BYTES)).astype(np.int8) for _ in range(2))
    first = tier(socket, mine)
    first.submit_store(job(1, keys_of(1, 2, 3), [4, 5, 6], False))
    (stored,) = finish(first)
    assert (stored.job_id, stored.success, stored.transfer_bytes) == (1, True, 3 * BYTES)
    second, before = tier(socket, theirs), theirs[9].copy()
    hit, miss = LookupResult.HIT, LookupResult.MISS
    assert looked_up(second, keys_of(1, 2, 3, 9), "a") == [hit, hit, hit, miss]
    second.submit_load(job(2, keys_of(3, 2, 1, 9), [0, 1, 2, 9], True))
    (loaded,) = finish(second)
    assert not loaded.success
    assert loaded.successful_keys == tuple(keys_of(3, 2, 1))
    assert (theirs[:3] == mine[[6, 5, 4]]).all()
    assert (theirs[9] == before).all()
    second.on_request_finished(ReqContext(req_id="a"))
    for changes in (
        {"model": SimpleNamespace(name="org/other", dtype="bfloat16")},
        {"model": SimpleNamespace(name="org/model", dtype="float16")},
        {"groups": (SimpleNamespace(group_id=0, tokens_per_block=16, layer_names=("b", "a")),)},
        {"kv_cache_layout": "HND"},
        {"settings": {"model_id": "named"}},
    ):
        stranger = tier(socket, theirs, **changes)
        assert looked_up(stranger, keys_of(1, 2, 3), "s") == [miss] * 3, changes
        stranger.shutdown()
    second.submit_load(job(3, keys_of(1), [3], True))
    second.drain_jobs()
    assert second.get_finished_jobs()[0].success
    assert looked_up(second, keys_of(1, 2, 3), "b") == [miss] * 3, "a reset forgets: weights may be others"
    assert looked_up(first, keys_of(1, 2, 3), "c") == [hit] * 3, "other engines go on"
    for each in (first, second):
        each.shutdown()


def without_an_agent() -> None:
    alone = tier("/nowhere/ems.sock", np.zeros((CHUNKS, BYTES), np.int8), settings={"timeout_ms": 50})
    assert looked_up(alone, keys_of(1), "a") == [LookupResult.MISS]
    alone.submit_store(job(1, keys_of(1), [0], False))
    alone.submit_load(job(2, keys_of(1), [0], True))
    assert [each.success for each in alone.get_finished_jobs()] == [False, False]
    alone.shutdown()
    told = ""
    try:
        tier("x", np.zeros((CHUNKS, BYTES), np.int8), settings={"sokcet": "y"})
    except ValueError as error:
        told = str(error)
    assert told.startswith("secondary_tiers.sokcet: is not known"), told
    try:
        tier("x", np.zeros((CHUNKS, BYTES), np.int8), settings={"handover_ms": 1})
    except ValueError as error:
        told = str(error)
    assert told.startswith("secondary_tiers.handover_ms: is not known"), told


if __name__ == "__main__":
    chunks_travel(sys.argv[1])
    without_an_agent()
    print("WELL")
