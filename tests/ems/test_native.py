"""The data paths in C++ and Python give the same bytes, checksums and answers; without a compiler, Python's is used."""

import ctypes
import logging
from itertools import accumulate

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ems.blocks import Arguments, Cache, plan
from ems.buffer import HostTensors, RegisteredCache
from ems.common.exception import EmsException
from ems.keys import Identity, KeySpace, Layout
from ems.native import library
from ems.native.build import BuildError, Library
from ems.native.plan import native_names, native_planner
from ems.native.tensors import NativeHostTensors, native_tensors
from ems.runs import SKIPPED, Areas, Block, Blocks
from ems.tensors import Tensor, as_tensor
from tests.support.compiling import runs_for_damaged, runs_for_two
from tests.support.homeless import lose_home

NUM_BLOCKS, WIDTHS = 6, (3, 8, 1)  # tensors of three token sizes, in two layer groups
BLOCK_SIZES, GROUP_OF = (4, 4, 2), [0, 0, 1]
run = st.integers(0, NUM_BLOCKS - 1).flatmap(lambda number: st.tuples(st.just(number), st.just(0), st.integers(1, 2)))
skipped = st.tuples(st.just(SKIPPED), st.just(0), st.integers(1, 2))
group = st.lists(run | skipped, min_size=1, max_size=3).map(tuple)
some_blocks = st.lists(st.tuples(group, group), min_size=1, max_size=4)


@pytest.fixture(scope="module", autouse=True)
def _has_a_compiler():
    if native_tensors(tensors_of(0), GROUP_OF) is None:
        pytest.skip("there is no C++ compiler")


def tensors_of(seed: int) -> list[Tensor]:
    """Tensors with gaps between their blocks, in memory of which the beginning and the end are not theirs."""
    random = np.random.default_rng(seed)
    made = []
    for width, size in zip(WIDTHS, BLOCK_SIZES, strict=True):
        whole = random.integers(0, 256, (NUM_BLOCKS + 2, size + 1, 1, width), np.uint8)
        made.append(as_tensor("t", whole[1:-1, :size]))
    return made


def both(seed: int) -> list[tuple[list[Tensor], NativeHostTensors | HostTensors]]:
    one, other = tensors_of(seed), tensors_of(seed)
    native = native_tensors(one, GROUP_OF)
    assert native is not None
    return [(one, native), (other, HostTensors(other, GROUP_OF))]


def size_of(block: Block) -> int:
    return sum(
        count * width for width, group in zip(WIDTHS, GROUP_OF, strict=True) for _number, _start, count in block[group]
    )


def without_skips(block: Block) -> Block:
    return tuple(tuple((max(0, number), start, count) for number, start, count in runs) for runs in block)


@given(blocks=some_blocks, gap=st.integers(0, 70))
@settings(max_examples=60, deadline=None)
def test_blocks_are_gathered_and_summed_alike(blocks, gap):
    saved = [without_skips(block) for block in blocks]
    sizes = list(map(size_of, saved))
    results = []
    for _tensors, mover in both(1):
        memory = np.zeros(sum(sizes) + gap * len(sizes), np.uint8)
        offsets = [sum(sizes[:i]) + gap * i for i in range(len(sizes))]
        sums = mover.gather_summed(Blocks.of(saved), Areas({7: memory}, [7] * len(sizes), offsets, sizes))
        results.append((memory.tobytes(), sums))
        digests = [xxhash.xxh3_128_digest(memory[o : o + n].data) for o, n in zip(offsets, sizes, strict=True)]
        assert sums == b"".join(digests)
    assert results[0] == results[1]


@given(blocks=some_blocks, damaged=st.integers(0, 5), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_blocks_are_scattered_alike_up_to_the_first_that_is_damaged(blocks, damaged, seed):
    random = np.random.default_rng(seed)
    sources = [random.integers(0, 256, size_of(block), np.uint8) for block in blocks]
    sums = b"".join(xxhash.xxh3_128_digest(source.data) for source in sources)
    if damaged < len(blocks):
        sources[damaged][-1] ^= 1
    results = []
    for tensors, mover in both(2):
        count = mover.scatter_checked(Blocks.of(blocks), sources, sums)
        assert count == min(damaged, len(blocks))
        results.append([tensor.data.base.tobytes() for tensor in tensors])
    assert results[0] == results[1]


def test_a_source_that_is_shorter_than_its_block_is_not_read():
    (_tensors, native), _python = both(3)
    blocks = Blocks.of([(((0, 0, 2),), ((0, 0, 1),))])
    short = np.zeros(size_of(blocks[0]) - 1, np.uint8)
    assert native.scatter_checked(blocks, [short], xxhash.xxh3_128_digest(short.data)) == 0


def test_parts_of_blocks_are_those_blocks():
    made = [(((i, 0, 1), (i, 1, 1)), ((i, 0, 2),)) for i in range(5)]
    blocks = Blocks.of(made)
    assert list(blocks) == made
    assert list(blocks[1:3]) == made[1:3]
    assert list(blocks[4:4]) == []
    assert blocks[-1] == made[4]
    with pytest.raises(IndexError):
        blocks[5]


def test_areas_outside_of_their_memory_are_told():
    memory = {0: np.zeros(100, np.uint8)}
    assert Areas(memory, [0, 0], [0, 90], [10, 10]).are_within()
    for offset, length in ((91, 10), (-1, 5), (0, -1), (2**62, 10)):
        assert not Areas(memory, [0], [offset], [length]).are_within()


def test_without_a_compiler_blocks_move_through_python_and_the_log_says_so_once(tmp_path, monkeypatch, caplog):
    (tmp_path / "broken.cpp").write_text("int f( {")
    broken = Library("broken", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    for compiler in ("c++", "/nowhere/c++"):
        monkeypatch.setenv("CXX", compiler)
        with pytest.raises(BuildError, match="there is no C\\+\\+ compiler"):
            broken.path()
    with caplog.at_level(logging.WARNING):
        assert [library.load(broken, lambda _library: None) for _ in range(2)] == [None, None]
    (said,) = caplog.messages
    assert said == "broken is not used, blocks move through Python, which is slower: there is no C++ compiler"


def test_without_a_home_blocks_move_through_python_too(tmp_path, monkeypatch, caplog):
    lose_home(monkeypatch)
    kept_nowhere = Library("homeless", tmp_path)
    assert library.is_to_be_compiled(kept_nowhere)
    assert library.load(kept_nowhere, lambda _library: None) is None
    assert caplog.messages[0].endswith(": ~/.cache: this user has no home folder: set HOME or XDG_CACHE_HOME")


def test_what_does_not_compile_is_told_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "broken.cpp").write_text("int f( {")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(BuildError, match=r"failed: .*broken\.cpp:1:\d+: error: [^\n]*$"):
        Library("broken", tmp_path).path()


def test_the_compiler_runs_once_for_all_who_come_meanwhile(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = Library("wanted", tmp_path)
    assert runs_for_two(Library, "compile", wanted.path, monkeypatch) == 1


def test_a_damaged_library_is_compiled_again(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    wanted = Library("wanted", tmp_path)
    assert runs_for_damaged(Library, "compile", wanted.path, monkeypatch) == [0, 1, 1, 1, 1]


def test_it_can_be_switched_off(monkeypatch):
    kv = [[np.zeros((2, 4, 1, 8), np.uint8)]]
    assert isinstance(RegisteredCache(kv).tensors, NativeHostTensors)
    monkeypatch.setenv("EMS_NATIVE", "0")
    assert isinstance(RegisteredCache(kv).tensors, HostTensors)


def test_a_library_that_sums_otherwise_is_not_used(monkeypatch):
    assert library.sums_alike(xxhash.xxh3_128_digest)
    assert not library.sums_alike(lambda data: xxhash.xxh3_128_digest(data)[::-1])
    assert not library.sums_alike(lambda data: xxhash.xxh3_128_digest(data[:30000]))


@given(
    hashes=st.lists(st.integers(-(2**70), 2**70) | st.integers(-(2**63), 2**63 - 1) | st.integers(0, 300), max_size=5)
    | st.lists(st.integers(0, 2**64 - 1), max_size=5),
    groups=st.integers(1, 3),
    tokens=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20),
)
def test_names_are_those_of_python(hashes, groups, tokens):
    library = native_names()
    assert library is not None
    keys = KeySpace(b"salt", Identity("m", "vllm", "MHA", 1, 1, 0, 0), Layout("uint8", 4, ((1, 8),)), library)
    counts = np.arange(len(hashes) * groups).reshape(len(hashes), groups) + 1
    assert keys.of_chunks(hashes, counts) == b"".join(map(keys.of_chunk, hashes, counts.tolist()))
    assert keys.of_sequence(np.array(tokens), 3) == b"".join(keys.of_tokens(tokens, 3))


numbers = st.integers(-1, 24) | st.sampled_from([True, 2**63, 2**70, -(2**64), 1.5, "1", None, np.int64(3)])


def shaped(values: list[object], shape: str) -> object:
    return {"list": list, "tuple": tuple}[shape](values) if shape != "array" else np.array(values)


ASCENDING = list(range(24))
counted = st.lists(st.integers(1, 5), max_size=4)


@settings(max_examples=300)
@given(
    counts=counted | st.lists(st.integers(1, 5) | st.sampled_from([0, -1, 2**62]), max_size=4) | st.just([2**62] * 4),
    order=st.permutations(range(24)),
    spoiled=st.none() | st.tuples(st.integers(0, 9), numbers),
    values=st.lists(st.integers(-1, 24), min_size=4, max_size=4) | st.lists(numbers, min_size=4, max_size=4),
    shape=st.sampled_from(["list", "tuple", "array"]),
)
@example(counts=[5, 3], order=ASCENDING, spoiled=None, values=[1, 2, 3, 4], shape="list")  # into the next block
@example(counts=[3], order=ASCENDING, spoiled=(1, 0), values=[1, 2, 3, 4], shape="list")  # one slot twice in a block
@example(counts=[2, 2], order=ASCENDING, spoiled=(3, 0), values=[1, 2, 3, 4], shape="list")  # one slot in two blocks
@example(counts=[4], order=ASCENDING, spoiled=None, values=[True, 2, 3, 4], shape="list")
@example(counts=[4, 2], order=ASCENDING, spoiled=None, values=[-1, 2**63, 3, 4], shape="tuple")
@example(counts=[4, 2], order=ASCENDING, spoiled=None, values=[1, 2**63, 3, 4], shape="list")
def test_a_call_is_planned_as_python_plans_it(counts, order, spoiled, values, shape):
    registered = RegisteredCache([[np.zeros((6, 4, 1, 8), np.uint8), np.zeros((6, 4, 1, 3), np.uint8)]])
    keys = KeySpace(b"salt", Identity("m", "vllm", "MHA", 1, 1, 0, 0), registered.layout)
    total = sum(counts) if 0 <= sum(counts) <= 20 else 5
    slots: list[object] = sorted(order[:total]) if order[0] % 2 else list(order[:total])
    if spoiled is not None and spoiled[0] < total:
        slots[spoiled[0]] = spoiled[1]
    planner = native_planner(registered.tensors, (4, 24), keys.hash_base)
    assert planner is not None
    arguments = Arguments(shaped(slots, shape), shaped(values[: len(counts)], shape), shaped(counts, shape), {})
    planned = planner.plan(*arguments[:3])
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("ems.blocks.native_cut", lambda *_arguments: None)  # otherwise C++ would cut for both
            found = plan(Cache(keys, 4, 24), arguments)
    except EmsException:
        assert planned is None
        return
    given = [*slots, *values[: len(counts)]]
    assert planned is not None or any(type(value) is not int or not -(2**63) <= value < 2**63 for value in given)
    if planned is not None:
        assert len(planned) == len(found)
        assert planned.all_sizes() == [count * 11 for count in counts]
        assert ctypes.string_at(planned.keys, 32 * len(found)) == found.keys(0, len(found))
        edges = list((ctypes.c_int64 * (len(found) + 1)).from_address(planned.blocks.edges))
        assert edges == found.blocks.edges.tolist() == list(accumulate((len(b[0]) for b in found.blocks), initial=0))
        runs = (ctypes.c_int64 * (3 * edges[-1])).from_address(planned.blocks.runs)
        assert list(runs) == found.blocks.runs[: edges[-1]].ravel().tolist()
