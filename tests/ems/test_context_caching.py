"""Saving and loading (spec ems 8): semantics, results, argument errors."""

import json
import logging

import numpy as np
import pytest
import torch

from ems import CcKvOption, CcResult, EmsErrorCode, EmsException, transport
from tests.support.pool.agents import copy_of, new_kv, running_agent, session, slots_of, tokens_of, zero
from tests.support.waiting import WAIT_S, until


def test_saved_blocks_come_back_at_other_slots(cc, kv):
    before = copy_of(kv)
    assert cc.save(slots_of(0, 1), [0xABCD, 0x1234], [4, 4]) == CcResult(2, 2)
    zero(kv)
    assert cc.load(slots_of(9, 5), [0xABCD, 0x1234], [4, 4]) == CcResult(2, 2)
    assert torch.equal(tokens_of(kv, slots_of(9, 5)), tokens_of(before, slots_of(0, 1)))


@pytest.mark.parametrize("value", [0, -1, 2**63, -(2**63), 2**255 + 7, -(2**300)])
def test_any_integer_is_a_hash(cc, value):
    cc.save(slots_of(0), [value], [4])
    assert cc.exists([value]) == 1
    assert cc.exists([value + 1]) == 0
    assert cc.exists([-value]) == (1 if value == 0 else 0)


@pytest.mark.parametrize("is_direct", [False, True])
def test_of_two_writers_of_one_key_with_other_bytes_the_first_is_read(is_direct):
    with running_agent(is_direct=is_direct) as agent:
        kv, other_kv = new_kv(), new_kv(seed=1)
        with session(agent.config.socket, kv) as cc, session(agent.config.socket, other_kv) as other:
            assert cc.save(slots_of(0, 1), [1, 2], [4, 4]) == CcResult(2, 2)
            assert other.save(slots_of(0, 1, 2), [1, 2, 3], [4, 4, 4]) == CcResult(3, 3), "a cache: no error"
            expected = [tokens_of(copy_of(kv), slots_of(0, 1)), tokens_of(copy_of(other_kv), slots_of(2))]
            for cache, caching in ((kv, cc), (other_kv, other)):
                zero(cache)
                assert caching.load(slots_of(5, 6, 7), [1, 2, 3], [4, 4, 4]) == CcResult(3, 3)
                assert torch.equal(tokens_of(cache, slots_of(5, 6, 7)), torch.cat(expected))


def test_a_hole_ends_the_result_and_leaves_the_rest_of_the_cache_alone(cc, kv):
    cc.save(slots_of(0), [1], [4])
    cc.save(slots_of(2), [3], [4])
    zero(kv)
    assert cc.load(slots_of(0, 1, 2), [1, 2, 3], [4, 4, 4]) == CcResult(1, 3)
    assert not tokens_of(kv, slots_of(1, 2)).any()
    assert cc.exists([1, 2, 3]) == 1


def test_slots_may_be_scattered_and_blocks_partial(cc, kv):
    before = copy_of(kv)
    source, target = [9, 3, 4, 5, 30, 31, 32], [70, 71, 72, 73, 100, 0, 1]
    assert cc.save(source, [1, 2], [4, 3]) == CcResult(2, 2)
    assert cc.load(target, [1, 2], [4, 3]) == CcResult(2, 2)
    assert torch.equal(tokens_of(kv, target), tokens_of(before, source))
    assert cc.load(slots_of(0), [2], [4]) == CcResult(0, 1), "a block of another length is another block"


def test_token_semantics_with_a_partial_tail_and_a_mask(cc, kv):
    before, slots, tokens = copy_of(kv), [0, 1, 2, 3, 4, 5], [101, 102, 103, 104, 105, 106]
    mask = [0, 0, 0, 0, 1, 1]
    assert cc.save(slot_mapping=slots, token_ids=tokens, mask=mask) == CcResult(1, 1)
    zero(kv)
    assert cc.load(slot_mapping=slots, token_ids=tokens, mask=mask) == CcResult(1, 1)
    assert torch.equal(tokens_of(kv, [4, 5]), tokens_of(before, [4, 5]))
    assert cc.load(slot_mapping=slots, token_ids=[7, *tokens[1:]], mask=mask) == CcResult(0, 1)
    assert cc.load(slot_mapping=slots, token_ids=torch.tensor(tokens)) == CcResult(0, 2)
    assert cc.save(slot_mapping=slots, token_ids=tokens, mask=[0] * 6) == CcResult(0, 0)


def test_masked_slots_are_not_looked_at(cc):
    assert cc.save([-1, -1, -1, -1, 4, 5], token_ids=[1, 2, 3, 4, 5, 6], mask=[0, 0, 0, 0, 1, 1]).success == 1


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({}, "hashes"),
        ({"slot_mapping": [0], "tonken_ids": [1]}, "tonken_ids"),
        ({"slot_mapping": [], "hashes": [], "offsets": []}, "slot_mapping"),
        ({"slot_mapping": [0, 1, 2, 3, 4, 5], "hashes": [1, 2], "offsets": [4, 4]}, "offsets"),
        ({"slot_mapping": [0, 1], "hashes": [1, 2], "offsets": [2]}, "hashes"),
        ({"slot_mapping": [0, 1], "hashes": [1, 2], "offsets": [2, 0]}, "offsets"),
        ({"slot_mapping": [0], "hashes": [1.5], "offsets": [1]}, "hashes"),
        ({"slot_mapping": [0], "hashes": [1]}, "offsets"),
        ({"slot_mapping": [0.5], "hashes": [1], "offsets": [1]}, "slot_mapping"),
        ({"slot_mapping": [[0]], "hashes": [1], "offsets": [1]}, "slot_mapping"),
        ({"slot_mapping": [-1], "hashes": [1], "offsets": [1]}, "slot_mapping"),
        ({"slot_mapping": [64 * 4], "hashes": [1], "offsets": [1]}, "slot_mapping"),
        ({"slot_mapping": [0], "hashes": [1], "offsets": [1], "mask": [1]}, "mask"),
        ({"slot_mapping": [0], "hashes": [1], "offsets": [1], "token_ids": [1]}, "hashes"),
        ({"slot_mapping": [0], "token_ids": [1, 2]}, "token_ids"),
        ({"slot_mapping": [0], "token_ids": [1], "offsets": [1]}, "offsets"),
        ({"slot_mapping": [0, 1], "token_ids": [1, 2], "mask": [1]}, "mask"),
        ({"slot_mapping": [0, 1], "token_ids": [1, 2], "mask": [1, 0]}, "mask"),
        ({"slot_mapping": [0, 1], "token_ids": [1, 2], "mask": [2, 2]}, "mask"),
        ({"slot_mapping": [0], "hashes": [1], "offsets": [1], "option": None}, "option"),
        ({"slot_mapping": [0], "hashes": [1], "offsets": [1], "option": CcKvOption(timeout=-1)}, "option.timeout"),
    ],
)
@pytest.mark.parametrize("call", ["save", "load", "async_save", "async_load"])
def test_a_wrong_argument_is_named(cc, call, arguments, name):
    with pytest.raises(EmsException) as caught:
        getattr(cc, call)(**arguments)
    assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT
    assert caught.value.message().split(":")[0] == name


@pytest.mark.parametrize(
    "kvcache",
    [None, [], [[]], [[1]], [[torch.zeros(2, 4)]], [[torch.zeros(2, 4, 2, 8), torch.zeros(2, 5, 2, 8)]],
     [[torch.zeros(2, 4, 2, 8), torch.zeros(2, 4, 2, 8).half()]], [[torch.zeros(2, 0, 2, 8)]],
     [[torch.zeros(2, 4, 8, 2).transpose(2, 3)]], [[torch.zeros(2, 4, 2, 8, device="meta")]]],
)  # fmt: skip
def test_a_cache_of_a_wrong_form_is_refused(cc, kvcache):
    with pytest.raises(EmsException, match="kvcache"):
        cc.register_kvcache(kvcache)


def test_nothing_is_stored_before_a_cache_is_registered(cc):
    cc._cache = None
    with pytest.raises(EmsException, match="register_kvcache"):
        cc.save([0], [1], [1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.int8])
def test_every_element_type_is_kept_bit_for_bit(agent, dtype):
    raw = torch.randint(0, 256, (8, 4, 2, 16), dtype=torch.uint8)
    kv = [[raw.view(dtype)]]
    with session(agent.config.socket, kv, model_id=str(dtype).replace("torch.", "")) as cc:
        before = raw.clone()
        assert cc.save(slots_of(0, 1), [1, 2], [4, 4]).success == 2
        raw[4:].zero_()
        assert cc.load(slots_of(4, 5), [1, 2], [4, 4]).success == 2
        assert torch.equal(raw[4:6], before[:2])


def test_tensors_of_an_mla_layer_differ_in_width_and_may_be_views(agent):
    whole = torch.randn(8, 2, 4, 24)
    kv = [[whole[:, 0], torch.randn(8, 4, 6)]]
    with session(agent.config.socket, kv, kvcache_type="MLA") as cc:
        before = [tensor.clone() for tensor in kv[0]]
        assert cc.save(slots_of(1), [1], [4]).success == 1
        assert cc.load(slots_of(6), [1], [4]).success == 1
        assert all(torch.equal(now[6], then[1]) for now, then in zip(kv[0], before, strict=True))
        assert torch.equal(whole[6, 1], whole[6, 1].clone())


def test_mla_ranks_share_blocks_and_others_do_not(agent):
    kv = new_kv()
    for kind, shared in (("MLA", 1), ("MHA", 0)):
        rank0 = {"kvcache_type": kind, "tp_world_size": 2}
        with (
            session(agent.config.socket, kv, **rank0) as a,
            session(agent.config.socket, kv, **rank0, rank_in_tp_group=1) as b,
        ):
            a.save(slots_of(0), [77], [4])
            assert b.exists([77]) == shared


@pytest.mark.parametrize("change", [{"model_id": "other"}, {"llm_engine": "sglang"}, {"pp_world_size": 2}])
def test_another_model_engine_or_parallelism_does_not_see_the_block(agent, kv, cc, change):
    cc.save(slots_of(0), [1], [4])
    with session(agent.config.socket, kv, **change) as other:
        assert other.exists([1]) == 0
    with session(agent.config.socket, kv) as same:
        assert same.exists([1]) == 1


def test_another_layout_does_not_see_the_block(agent, cc):
    cc.save(slots_of(0), [1], [4])
    with session(agent.config.socket, new_kv(heads=4, dim=4)) as other:
        assert other.exists([1]) == 0


def test_futures_give_the_result_of_the_call(cc, kv):
    before = copy_of(kv)
    futures = [cc.async_save(slots_of(i), [i], [4]) for i in range(64)]
    assert [cc.get_result(future) for future in futures] == [CcResult(1, 1)] * 64
    assert all(cc.is_ready(future) for future in futures)
    zero(kv)
    futures = [cc.async_load(slots_of(63 - i), [i], [4]) for i in range(64)]
    assert [future.result() for future in futures] == [CcResult(1, 1)] * 64
    assert torch.equal(tokens_of(kv, slots_of(*range(63, -1, -1))), tokens_of(before, slots_of(*range(64))))
    for call in (cc.is_ready, cc.get_result):
        with pytest.raises(EmsException, match="ccfuture"):
            call(None)


def test_many_blocks_go_in_sub_batches(agent):
    kv = new_kv(num_blocks=300)
    with session(agent.config.socket, kv) as cc:
        before, hashes = copy_of(kv), list(range(150))
        assert cc.save(slots_of(*range(150)), hashes, [4] * 150) == CcResult(150, 150)
        assert cc.load(slots_of(*range(150, 300)), hashes, [4] * 150) == CcResult(150, 150)
        assert torch.equal(tokens_of(kv, slots_of(*range(150, 300))), tokens_of(before, slots_of(*range(150))))


def test_a_full_pool_keeps_the_prefix_of_the_batch():
    kv = new_kv(num_blocks=200, layers=8, heads=4, dim=64)  # 32 KiB per block
    with running_agent(pool_bytes=1 << 20) as agent, session(agent.config.socket, kv) as cc:
        result = cc.save(slots_of(*range(100)), list(range(100)), [4] * 100)
        assert (result.total, result.success) == (100, 32)
        assert cc.load(slots_of(*range(100, 132)), list(range(32)), [4] * 32) == CcResult(32, 32)
        assert cc.save(slots_of(*range(100)), list(range(100, 200)), [4] * 100).success == 32
        assert cc.exists(list(range(32))) == 0
        agent.node.pool("default").check()


def test_after_its_answer_a_full_pool_has_room_for_another_batch_and_keeps_the_last():
    kv = new_kv(num_blocks=200, layers=8, heads=4, dim=64)  # 32 KiB per block
    with running_agent(pool_bytes=1 << 20) as agent, session(agent.config.socket, kv) as cc:
        usage = agent.node.pool("default").usage
        assert cc.save(slots_of(*range(32)), list(range(32)), [4] * 32).success == 32
        assert cc.save(slots_of(0, 1), [100, 101], [4, 4]).success == 2
        until(lambda: usage()["blocks"] == 30)  # 1/16 of the pool is two blocks
        assert cc.exists([100, 101]) == 2
        assert cc.exists(list(range(32))) == 28, "its end makes room"
        for _ in range(3):  # nothing new is saved, so nothing is evicted
            assert cc.save(slots_of(0, 1), [100, 101], [4, 4]).success == 2
        assert usage()["blocks"] == 30


def test_a_block_larger_than_the_pool_takes_is_not_saved():
    kv = new_kv(num_blocks=4, layers=8, heads=64, dim=128)
    with running_agent() as agent, session(agent.config.socket, kv) as cc:
        assert cc.save(slots_of(0), [1], [4]) == CcResult(0, 1)
        assert cc.load(slots_of(0), [1], [4]) == CcResult(0, 1)


def test_the_first_write_of_a_key_wins(cc, kv, agent):
    before = copy_of(kv)
    assert cc.save(slots_of(0), [1], [4]).success == 1
    assert cc.save(slots_of(0), [1], [4]).success == 1
    assert cc.save(slots_of(5), [1], [4]).success == 1
    cc.load(slots_of(9), [1], [4])
    assert torch.equal(tokens_of(kv, slots_of(9)), tokens_of(before, slots_of(0)))
    counts = agent.node.pool("default").counts
    assert (counts["save_stored"], counts["save_duplicate"], counts["save_conflict"]) == (1, 1, 1)


def test_a_timeout_of_zero_is_one_local_attempt(cc, monkeypatch):
    monkeypatch.setattr(transport, "_FLOOR_S", WAIT_S)  # for the agent's answer on a busy machine
    cc.save(slots_of(0), [1], [4])
    assert cc.load(slots_of(0), [1], [4], CcKvOption(timeout=0)) == CcResult(1, 1)
    assert cc.load(slots_of(0), [2], [4], CcKvOption(timeout=0)) == CcResult(0, 1)


def test_profiling_writes_a_line_a_call(agent, kv, tmp_path, monkeypatch):
    monkeypatch.setenv("ENABLE_CC_PROFILING", "1")
    monkeypatch.setenv("EMS_SDK_LOG", str(tmp_path / "log"))
    with session(agent.config.socket, kv) as cc:
        cc.save(slots_of(0), [1], [4])
        cc.async_load(slots_of(0, 1), [1, 2], [4, 4]).result()
    (file,) = (tmp_path / "log").iterdir()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(e["operation"], e["success"], e["total"], e["bytes"]) for e in lines] == [
        ("save", 1, 1, 512), ("async_load", 1, 2, 512)
    ]  # fmt: skip


def test_after_shutdown_an_asynchronous_call_is_an_io_error(cc):
    cc.close()
    with pytest.raises(EmsException) as caught:
        cc.async_save(slots_of(0), [1], [4])
    assert caught.value.status_code() == EmsErrorCode.EMS_IO_ERROR


@pytest.mark.parametrize("is_native", [True, False])
def test_with_snapshots_blocks_may_change_at_once(agent, monkeypatch, is_native):
    monkeypatch.setenv("EMS_ASYNC_SNAPSHOT", "1")
    if not is_native:
        monkeypatch.setattr(transport.Link, "_native", lambda link: None)
    kv = new_kv()
    before = copy_of(kv)
    slots = slots_of(*range(32))
    with session(agent.config.socket, kv) as cc:
        futures = []
        for turn in range(8):
            hashes = list(range(100 * turn, 100 * turn + 32))
            futures.append(cc.async_save(slots, hashes, [4] * 32))
            zero(kv)
            restore(kv, before)
        zero(kv)
        assert [future.result().success for future in futures] == [32] * 8
        assert cc._snapshot_bytes == 0
        for turn in range(8):
            zero(kv)
            assert cc.load(slots, list(range(100 * turn, 100 * turn + 32)), [4] * 32).success == 32
            assert (tokens_of(kv, slots) == tokens_of(before, slots)).all()


def test_too_many_snapshots_make_a_save_wait(agent, monkeypatch):
    monkeypatch.setenv("EMS_ASYNC_SNAPSHOT", "1")
    monkeypatch.setattr("ems.context_caching._MAX_SNAPSHOT_BYTES", 0)
    with session(agent.config.socket, new_kv()) as cc:
        assert cc.async_save(slots_of(0), [1], [4]).done()
        assert cc.load(slots_of(0), [1], [4]).success == 1


def restore(kv, before) -> None:
    for layer, old_layer in zip(kv, before, strict=True):
        for tensor, old in zip(layer, old_layer, strict=True):
            tensor.copy_(old)


@pytest.mark.parametrize(
    "form",
    [
        list,
        tuple,
        torch.tensor,
        np.array,
        lambda bits: [bool(bit) for bit in bits],
        lambda bits: torch.tensor(bits).bool(),
        lambda bits: np.array(bits, bool),
    ],
)
def test_masks_in_every_form_and_within_a_block(cc, kv, form):
    """The example of spec ems 8.5: nine tokens, blocks of four, six of them skipped."""
    tokens, slots = list(range(201, 210)), list(range(20, 29))
    truth = tokens_of(kv, slots)
    assert cc.save(slots, token_ids=tokens, mask=form([0, 0, 0, 0, 1, 1, 1, 1, 1])) == CcResult(2, 2)
    zero(kv)
    assert cc.load(slots, token_ids=tokens, mask=form([0, 0, 0, 0, 0, 0, 1, 1, 1])) == CcResult(2, 2)
    found = tokens_of(kv, slots)
    assert (found[6:] == truth[6:]).all()
    assert (found[:6] == 0).all(), "what the mask skips stays as it was"
    assert cc.save(slots, token_ids=tokens, mask=form([0, 0, 0, 1, 1, 1, 1, 1, 1])) == CcResult(3, 3)
    assert cc.load(slots, token_ids=tokens, mask=form([0] * 9)) == CcResult(0, 0)


@pytest.mark.parametrize("mask", [[0, 1, 0, 1], [0, 2, 2, 2], [True, False, True, True], "0011"])
def test_a_mask_is_zeros_and_then_ones(cc, mask):
    with pytest.raises(EmsException, match="mask: "):
        cc.load(slots_of(0), token_ids=[1, 2, 3, 4], mask=mask)


@pytest.mark.parametrize(
    "hashes", [[np.int64(-5), np.uint64(2**63)], np.array([-5, 7]), torch.tensor([-5, 7]), (-5, 7)]
)
def test_hashes_of_numpy_and_torch(cc, hashes):
    assert cc.save(slots_of(0, 1), hashes, [4, 4]).success == 2
    assert cc.exists([int(value) for value in hashes]) == 2


@pytest.mark.parametrize("hashes", [[True, 1], [1.0, 2], np.array([1.5, 2]), "ab", [[1], [2]], None])
def test_hashes_that_are_none(cc, hashes):
    with pytest.raises(EmsException, match="hashes: "):
        cc.save(slots_of(0, 1), hashes, [4, 4])


@pytest.mark.parametrize("slots", [[0, 1, 2, 2], [0, 1, 0, 1], [3, 2, 1, 3]])
def test_a_slot_is_named_once(cc, slots):
    for call in (cc.save, cc.load):
        with pytest.raises(EmsException, match=r"slot_mapping: slot \d is named more than once"):
            call(slots, [1], [4])
    assert cc.save([3, 2, 1, 0], [1], [4]).success == 1, "in any order"


def test_a_short_tail_exists_by_its_offset(cc):
    assert cc.save([0, 1, 2, 3, 4, 5], [1, 2], [4, 2]).success == 2
    assert (cc.exists([1, 2]), cc.exists([1, 2], offsets=[4, 2]), cc.exists([1, 2], offsets=[4, 3])) == (1, 2, 1)
    with pytest.raises(EmsException, match="hashes: 2 hashes for 1 offsets"):
        cc.exists([1, 2], offsets=[4])


def test_a_block_larger_than_a_slab_is_told_once(agent, caplog):
    caplog.set_level(logging.WARNING)
    kv = new_kv(num_blocks=4, dim=8192)
    with session(agent.config.socket, kv) as cc:
        for _ in range(2):
            assert cc.save(slots_of(0), [1], [4]) == CcResult(0, 1)
    assert caplog.text.count("--slab") == 1
