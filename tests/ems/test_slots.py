"""A slot is one token of one block, whatever the block size: planning and copying agree with plain indexing."""

from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ems import EmsErrorCode, EmsException
from ems.blocks import Arguments, Cache, plan
from ems.buffer import RegisteredCache, Snapshot
from ems.keys import Identity, KeySpace

IDENTITY = Identity("m", "e", "MHA", 1, 1, 0, 0)
NUM_SLOTS = 96


def cache_of(
    sizes: list[int], groups: list[list[int]] | None = None
) -> tuple[RegisteredCache, Cache, list[torch.Tensor]]:
    """A layer for each block size, of about NUM_SLOTS tokens, in tensors of different widths, with gaps."""
    layers = []
    for number, size in enumerate(sizes):
        whole = torch.randint(0, 256, (-(-NUM_SLOTS // size), size + 1, 1, 3 + number), dtype=torch.uint8)
        layers.append([whole[:, :size], torch.randint(0, 256, whole[:, :size].shape, dtype=torch.uint8)])
    registered = RegisteredCache(layers, groups)
    keys = KeySpace(b"salt", IDENTITY, registered.layout)
    cache = Cache(keys, registered.block_size, registered.num_slots, registered.groups)
    return registered, cache, [tensor for layer in layers for tensor in layer]


def tokens(tensor: torch.Tensor, slots: list[int]) -> np.ndarray:
    """The bytes of slots by plain indexing."""
    return tensor.flatten(0, 1)[slots].flatten(1).numpy()


@given(size=st.integers(1, 96), data=st.data(), copies=st.booleans())
def test_a_block_is_its_slots_in_order(size, data, copies):
    registered, cache, tensors = cache_of([size])
    slots = data.draw(st.lists(st.integers(0, NUM_SLOTS - 1), min_size=1, max_size=40, unique=True))
    if data.draw(st.booleans()):  # like an engine's blocks, whole and contiguous
        first = data.draw(st.integers(0, NUM_SLOTS // size - 1)) * size
        slots = [*range(first, first + size), *(slot for slot in slots if not first <= slot < first + size)]
    cuts = sorted(data.draw(st.sets(st.integers(1, len(slots)))) | {len(slots)})
    counts = [end - start for start, end in zip([0, *cuts], cuts, strict=False)]
    request = plan(cache, Arguments(slots, list(range(len(counts))), counts, {}))
    assert registered.sizes(request).tolist() == [count * registered.token_bytes for count in counts]
    targets = [np.empty(size, np.uint8) for size in registered.sizes(request)]
    (Snapshot(registered, request) if copies else registered.tensors).gather(request.blocks, targets)
    starts = [0, *accumulate(counts)]
    for target, start, end in zip(targets, starts, starts[1:], strict=False):
        want = np.concatenate([tokens(tensor, slots[start:end]).ravel() for tensor in tensors])
        assert (target == want).all()
    before = [tensor.clone() for tensor in tensors]
    registered.tensors.scatter(request.blocks, [255 - target for target in targets])
    others = [slot for slot in range(NUM_SLOTS) if slot not in slots]
    for tensor, old in zip(tensors, before, strict=True):
        assert (tokens(tensor, slots) == 255 - tokens(old, slots)).all()
        assert (tokens(tensor, others) == tokens(old, others)).all()


@given(sizes=st.lists(st.integers(1, 48), min_size=2, max_size=3), data=st.data())
def test_each_layer_group_has_slots_of_its_own_block_size(sizes, data):
    registered, cache, tensors = cache_of(sizes, [[number] for number in range(len(sizes))])
    chunk = st.tuples(st.integers(0, NUM_SLOTS - 1), st.integers(1, NUM_SLOTS)).map(
        lambda pair: (pair[0], min(pair[1], NUM_SLOTS - pair[0]))
    )
    chunks = [[data.draw(chunk)] for _ in sizes]
    request = plan(cache, Arguments(None, [7], None, {"chunk_descs": chunks}))
    (target,) = [np.empty(size, np.uint8) for size in registered.sizes(request)]
    registered.tensors.gather(request.blocks, [target])
    spans = [list(range(start, start + length)) for ((start, length),) in chunks for _side in range(2)]
    want = np.concatenate([tokens(tensor, span).ravel() for tensor, span in zip(tensors, spans, strict=True)])
    assert (target == want).all()


@pytest.mark.parametrize("changes", [{"size": 32}, {"dtype": torch.int8}, {"width": 4}, {"layers": 2}])
def test_another_block_size_type_or_shape_has_other_names(changes):
    def name(size: int = 16, dtype: torch.dtype = torch.uint8, width: int = 3, layers: int = 1) -> bytes:
        kv = [[torch.zeros(4, size, 1, width, dtype=dtype)] for _ in range(layers)]
        return KeySpace(b"salt", IDENTITY, RegisteredCache(kv).layout).of_hash(5, size)

    assert name(**changes) != name()


@pytest.mark.parametrize("form", [{"dtype": torch.bfloat16}, {"device": "meta"}])
def test_a_tensor_that_numpy_cannot_read_is_a_wrong_argument(cc, form):
    numbers = torch.zeros(1, **form)
    for name in ("slot_mapping", "hashes", "offsets"):
        for call in (cc.save, cc.load, cc.async_save, cc.async_load):
            with pytest.raises(EmsException, match=f"{name}: must be a") as caught:
                call(**{"slot_mapping": [0], "hashes": [1], "offsets": [1], name: numbers})
            assert caught.value.status_code() == EmsErrorCode.EMS_INVALID_ARGUMENT
    with pytest.raises(EmsException, match="hashes: must be a"):
        cc.exists(numbers)
