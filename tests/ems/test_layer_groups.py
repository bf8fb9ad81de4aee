"""Layer groups: each group of layers has its own slots, blocks and block size; a hash stands for all its parts."""

import pytest
import torch

from ems import EmsErrorCode, EmsException
from ems.context_caching import ContextCaching
from tests.support.pool.agents import copy_of, session

GROUPS = [[0, 2], [1]]


def new_cache(seed: int) -> list[list[torch.Tensor]]:
    """Layers 0 and 2 in 16 blocks of 4 tokens, layer 1 in 8 blocks of 16."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(16, 4, 2, 8), (8, 16, 2, 8), (16, 4, 2, 8)]
    return [[torch.randn(shape, generator=generator).half() for _ in range(2)] for shape in shapes]


@pytest.fixture
def kv() -> list[list[torch.Tensor]]:
    return new_cache(1)


@pytest.fixture
def cc(agent, kv):
    with session(agent.config.socket, new_cache(0)[:1]) as caching:
        caching.register_kvcache(kv, GROUPS)
        yield caching


def slots(kv: list[list[torch.Tensor]], layer: int, start: int, length: int) -> torch.Tensor:
    return torch.stack([side.flatten(0, 1)[start : start + length] for side in kv[layer]])


def test_each_group_is_loaded_into_slots_of_its_own(cc: ContextCaching, kv):
    true = copy_of(kv)
    saved = cc.save(hashes=[7, -8], chunk_descs=[[(0, 4), (4, 4)], [(0, 4), (14, 4)]])
    assert (saved.success, saved.total) == (2, 2)
    for layer in kv:
        for side in layer:
            side.zero_()
    loaded = cc.load(hashes=[7, -8], chunk_descs=[[(20, 4), (9, 4)], [(30, 4), (62, 4)]])
    assert loaded.success == 2
    for layer in (0, 2):
        assert torch.equal(slots(kv, layer, 20, 4), slots(true, layer, 0, 4))
        assert torch.equal(slots(kv, layer, 9, 4), slots(true, layer, 4, 4))
    assert torch.equal(slots(kv, 1, 30, 4), slots(true, 1, 0, 4))
    assert torch.equal(slots(kv, 1, 62, 4), slots(true, 1, 14, 4))  # both ranges cross the end of a block
    assert int(sum(side.count_nonzero() for layer in kv for side in layer)) <= 2 * 2 * 16 * (8 + 4)


def test_asynchronous_calls_and_copies_take_groups_too(agent, kv, monkeypatch):
    monkeypatch.setenv("EMS_ASYNC_SNAPSHOT", "1")
    with session(agent.config.socket, new_cache(0)[:1]) as cc:
        cc.register_kvcache(kv, GROUPS)
        true = copy_of(kv)
        future = cc.async_save(hashes=[1, 2], chunk_descs=[[(0, 4), (8, 2)], [(0, 16), (40, 3)]])
        for layer in kv:
            for side in layer:
                side.zero_()
        assert cc.get_result(future).success == 2
        assert cc.get_result(cc.async_load(hashes=[1], chunk_descs=[[(0, 4)], [(0, 16)]])).success == 1
        assert torch.equal(slots(kv, 1, 0, 16), slots(true, 1, 0, 16))


def test_a_hash_with_other_lengths_is_another_block(cc):
    cc.save(hashes=[7], chunk_descs=[[(0, 4)], [(0, 16)]])
    assert cc.load(hashes=[7], chunk_descs=[[(0, 4)], [(0, 8)]]).success == 0
    assert cc.exists([7, 8]) == 1


def test_without_groups_a_chunk_is_a_block_like_any_other(agent):
    kv = new_cache(1)[:1]
    with session(agent.config.socket, kv) as cc:
        true = copy_of(kv)
        assert cc.save([4, 5, 6, 7], [3], [4]).success == 1
        assert cc.load(hashes=[3], chunk_descs=[[(40, 4)]]).success == 1
        assert torch.equal(slots(kv, 0, 40, 4), slots(true, 0, 4, 4))


def test_the_last_slots_of_each_group_can_be_used(cc: ContextCaching, kv):
    true = copy_of(kv)
    assert cc.save(hashes=[7], chunk_descs=[[(60, 4)], [(112, 16)]]).success == 1
    assert cc.load(hashes=[7], chunk_descs=[[(0, 4)], [(0, 16)]]).success == 1
    assert torch.equal(slots(kv, 0, 0, 4), slots(true, 0, 60, 4))
    assert torch.equal(slots(kv, 1, 0, 16), slots(true, 1, 112, 16))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"slot_mapping": [0], "offsets": [1]}, "chunk_descs"),
        ({"slot_mapping": [0], "chunk_descs": [[(0, 1)], [(0, 1)]]}, "slot_mapping"),
        ({"chunk_descs": [[(0, 1)]]}, "chunk_descs"),
        ({"chunk_descs": [[(0, 1)], []]}, "chunk_descs[1]"),
        ({"chunk_descs": [[(0, 1)], [(0, 1, 2)]]}, "chunk_descs[1]"),
        ({"chunk_descs": [[(0, 0)], [(0, 1)]]}, "chunk_descs[0]"),
        ({"chunk_descs": [[(63, 2)], [(0, 1)]]}, "chunk_descs[0]"),
        ({"chunk_descs": [[(0, 1)], [(-1, 1)]]}, "chunk_descs[1]"),
        ({"chunk_descs": [[(0, 1)], ["x"]]}, "chunk_descs[1]"),
    ],
)
def test_wrong_chunks_are_named(cc, arguments, name):
    with pytest.raises(EmsException) as caught:
        cc.save(hashes=[1], **arguments)
    assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT
    assert caught.value.message().startswith(f"{name}: ")


@pytest.mark.parametrize("chunks", [[(0, 4), (0, 4)], [(2, 4), (0, 3)], [(0, 16), (15, 1)]])
def test_a_slot_is_named_once_in_each_group(cc, kv, chunks):
    before = copy_of(kv)
    for call in (cc.save, cc.load):
        with pytest.raises(EmsException, match=r"chunk_descs\[1\]: slot \d+ is named more than once"):
            call(hashes=[1, 2], chunk_descs=[[(0, 4), (4, 4)], chunks])
    assert all(torch.equal(a, b) for x, y in zip(kv, before, strict=True) for a, b in zip(x, y, strict=True))
    assert cc.save(hashes=[1, 2], chunk_descs=[[(4, 4), (0, 4)], [(4, 4), (0, 4)]]).success == 2


@pytest.mark.parametrize("groups", [[], "01", [[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2], []], [[0, 1, 2, 3]], [[True]]])
def test_wrong_groups_are_named(cc, kv, groups):
    with pytest.raises(EmsException, match="store_layer_group_desc: "):
        cc.register_kvcache(kv, groups)


def test_layers_of_one_group_have_one_block_size(cc, kv):
    with pytest.raises(EmsException, match="kvcache: tensor 2 has other blocks or block_size"):
        cc.register_kvcache(kv, [[0, 1], [2]])
