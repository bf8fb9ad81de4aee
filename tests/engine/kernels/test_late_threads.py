"""A thread of a step that loses its core, at whatever point, changes no bit of the results."""

import ctypes
import functools
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from kvloom.checkpoints.lora import read_adapter
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from tests.support.compiling import compiled
from tests.support.models.adapters import make_adapter

from .models import MIXED_FILE, SPECS, int32, model_in, ragged

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SOURCE = Path(__file__).with_name("cpp") / "late.cpp"
STEPS = 25  # each of them with several late threads
CASES = [(name, "w8a8", "bf16") for name in SPECS] + [
    ("smollm2 heads", "bf16", "int8"),
    ("smollm2 heads", "by channel", "bf16"),
    ("smollm2 heads", "w4a8", "bf16"),
    ("gelu, uneven sizes", "by channel", "int8"),
    (MIXED_FILE, "stored", "bf16"),
]


@functools.cache
def library() -> ctypes.CDLL:
    return ctypes.CDLL(str(compiled(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-pthread", SOURCE], "late.so")))


@contextmanager
def late(threads: list[int]) -> Iterator[None]:
    """Meanwhile these threads are stopped at random."""
    ids = int32(threads)
    library().late_begin(ids.ctypes.data_as(ctypes.c_void_p), len(ids))
    try:
        yield
    finally:
        library().late_end()


def threads_of_process() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def backend_of(name: str, weight_format: str, kv_dtype: str, num_threads: int) -> tuple[CpuBackend, list[int]]:
    """A backend and its threads."""
    spec, weights, weight_format = model_in(name, weight_format)
    before = threads_of_process()
    backend = CpuBackend(spec, weights, 64, CpuOptions(weight_format, kv_dtype, num_threads))
    return backend, [*(threads_of_process() - before), threading.get_native_id()]


def outcome(backend: CpuBackend, lengths: list[int], adapters: Sequence[int]) -> list[np.ndarray]:
    """Logits and most likely tokens of a step over prompts of these lengths, at the beginning of their blocks."""
    ids = torch.randint(0, 96, (sum(lengths),), generator=torch.Generator().manual_seed(6)).tolist()
    parts = [([ids.pop() for _ in range(length)], 0, [2 * i, 2 * i + 1]) for i, length in enumerate(lengths)]
    batch, rows = ragged(parts, adapters)
    tops = np.array([int(row) % 4 for row in rows])
    head = backend.step(batch, rows, tops.tolist())
    is_asked = np.arange(tops.max()) < tops[:, None]  # a row has as many as are asked of it
    return [head.full.copy(), head.values[is_asked], head.ids[is_asked]]


def check(backend: CpuBackend, threads: list[int], lengths: list[int], adapters: Sequence[int] = ()) -> None:
    want = outcome(backend, lengths, adapters)
    with late(threads):
        found = [outcome(backend, lengths, adapters) for _ in range(STEPS)]
    assert all(np.array_equal(a, b) for one in found for a, b in zip(one, want, strict=True))


@pytest.mark.parametrize("lengths", [[1] * 8, [1] * 20 + [12], [30, 25, 20]], ids=["8 rows", "32 rows", "75 rows"])
@pytest.mark.parametrize(("name", "weight_format", "kv_dtype"), CASES)
def test_a_late_thread_changes_no_bit(name, weight_format, kv_dtype, lengths):
    check(*backend_of(name, weight_format, kv_dtype, 2), lengths)


@pytest.mark.parametrize("num_threads", [1, 3, 5])
def test_nor_does_one_of_any_number(num_threads):
    check(*backend_of("smollm2 heads", "w8a8", "bf16", num_threads), [1] * 30)


@pytest.mark.parametrize("lengths", [[1] * 12, [2] * 20 + [30]], ids=["12 rows", "70 rows"])
@pytest.mark.parametrize("weight_format", ["w8a8", "bf16"])
def test_nor_does_one_in_a_step_with_adapters(tmp_path, weight_format, lengths):
    backend, threads = backend_of("smollm2 heads", weight_format, "bf16", 2)
    shapes = SPECS["smollm2 heads"].tensor_shapes()
    for id, rank in ((1, 3), (2, 16)):
        folder = make_adapter(tmp_path / str(id), shapes, id, rank, ("q", "v", "o", "up", "down"))
        backend.add_adapter(id, read_adapter(folder, shapes))
    check(backend, threads, lengths, [(0, 1, 2)[i % 3] for i in range(len(lengths))])


@pytest.mark.parametrize("lengths", [[1], [1, 2], [2, 3, 2]], ids=["1 row", "3 rows", "7 rows"])
def test_nor_does_one_in_a_step_of_few_rows(lengths):
    check(*backend_of("smollm2 heads", "by channel", "bf16", 2), lengths)
