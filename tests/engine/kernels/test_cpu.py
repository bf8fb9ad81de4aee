"""The CPU backend against the reference and against itself, on every ISA: alone or in a batch, whole or in chunks."""

import functools
import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kvloom.contract.errors import ModelError
from kvloom.contract.sampling import GREEDY_BELOW
from kvloom.rank.kernels import build
from kvloom.rank.kernels.backend import CHOICE, Head, Ragged
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.kernels.reference import ReferenceBackend, ReferenceOptions
from kvloom.rank.kernels.rope_table import rope_table
from kvloom.rank.sampler import draw_plain, uniforms

from .models import (
    MIXED,
    MIXTURES,
    SPECS,
    THIN_KINDS,
    MemoryWeights,
    Plan,
    all_logits,
    four_bit,
    int32,
    mixed_weights,
    ragged,
    random_weights,
    rope_of,
    step,
    tiny_spec,
)

AVAILABLE = [isa for isa, (_, needed) in build.ISAS.items() if needed <= build.cpu_flags()]
FORMATS = [("bf16", "bf16"), ("stored", "bf16"), ("w8a8", "bf16"), ("w4a8", "bf16"), ("w8a8", "int8")]
# Every model runs on the best instruction set and on one of the others in turn; test_cpu_native.py compares each kernel
# with its scalar reference on all of them. Tests of a pair stay together in random order, because their shared results
# are dropped after them.
OTHERS = itertools.cycle(AVAILABLE[1:])
EACH_MODEL = pytest.mark.parametrize(
    ("name", "isa"),
    [(name, isa) for name in SPECS for isa in (AVAILABLE[0], *itertools.islice(OTHERS, 1))],
    scope="module",
)
LENGTHS = (1, 2, 7, 15, 16, 17, 33, 130, 260)


def tokens_of(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 96, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def prompts() -> list[tuple[list[int], int, list[int]]]:
    """Prompts of all LENGTHS, in scattered blocks."""
    free = torch.randperm(64, generator=torch.Generator().manual_seed(3)).tolist()
    return [(tokens_of(n, n), 0, [free.pop() for _ in range(-(-n // 16))]) for n in LENGTHS]


@functools.cache
def weights_of(name: str) -> MemoryWeights:
    return random_weights(SPECS[name])


@functools.lru_cache(len(FORMATS))
def cpu(name: str, isa: str, weight_format: str = "bf16", kv_dtype: str = "bf16") -> CpuBackend:
    """A backend with two threads and 64 blocks, shared by tests; its blocks hold what earlier tests computed."""
    return CpuBackend(SPECS[name], weights_of(name), 64, CpuOptions(weight_format, kv_dtype, num_threads=2, isa=isa))


@functools.lru_cache(len(FORMATS))
def whole(name: str, isa: str, weight_format: str = "bf16", kv_dtype: str = "bf16") -> torch.Tensor:
    """Logits of all tokens of `prompts`, computed in one step. Tests must not change them."""
    return all_logits(cpu(name, isa, weight_format, kv_dtype), *ragged(prompts())).clone()


@functools.cache
def reference(name: str, kind: str = "") -> Head:
    """The reference backend's logits and states of all tokens of `prompts`. `kind`: "q4_0" or "q4_1" for weights made
    by four_bit, "int8" for an int8 cache.
    """
    weights = four_bit(weights_of(name), kind) if kind.startswith("q4") else weights_of(name)
    options = ReferenceOptions(kv_dtype=torch.int8) if kind == "int8" else ReferenceOptions()
    batch, every = ragged(prompts())
    return step(ReferenceBackend(SPECS[name], weights, 64, options), batch, every, [0] * len(every), every)


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    yield
    for made in (weights_of, cpu, whole, in_one_piece, reference, mixed):
        made.cache_clear()


@functools.cache
def mixed(isa: str, threads: int = 2, is_thin: bool = False) -> CpuBackend:
    weights = mixed_weights(**(THIN_KINDS if is_thin else {}))
    return CpuBackend(MIXED, weights, 64, CpuOptions("stored", num_threads=threads, isa=isa))


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


def slack(name: str) -> float:
    """Factor for error limits: of two experts with nearly equal scores, rounding may choose the other one; a delta rule
    divides queries and keys by their norms, and so enlarges errors of small ones; inputs of layers are more matrices.
    """
    spec = SPECS[name]
    return (1.5 if spec.experts or spec.layer_inputs else 1.0) * (2.5 if spec.recurrent else 1.0)


@EACH_MODEL
@pytest.mark.parametrize(("weight_format", "limit"), [("bf16", 0.02), ("w8a8", 0.04)])
def test_logits_are_near_the_reference(name, isa, weight_format, limit):
    assert relative_error(whole(name, isa, weight_format), reference(name).full) < limit * slack(name)


@pytest.mark.parametrize("isa", AVAILABLE)
@pytest.mark.parametrize("name", ["llama", "smollm2 heads", "qwen2"])
@pytest.mark.parametrize("kind", ["q4_0", "q4_1"])
def test_four_bit_blocks_of_a_file_keep_their_values(name, isa, kind):
    """As close to the dequantised file as 8 bits allow: only quantised activations cause an error."""
    spec = SPECS[name]
    backend = CpuBackend(spec, four_bit(weights_of(name), kind), 64, CpuOptions("w4a8", num_threads=2, isa=isa))
    limit = 0.04 if spec.intermediate % 32 == 0 else 0.2  # down's 200 columns are no whole blocks: it is quantised here
    assert relative_error(all_logits(backend, *ragged(prompts())), reference(name, kind).full) < limit


@pytest.mark.parametrize("isa", AVAILABLE)
@pytest.mark.parametrize("own", MIXTURES.values(), ids=MIXTURES)
def test_a_file_of_many_kinds_of_blocks_keeps_its_values(isa, own):
    """Only quantised activations cause an error: it is smaller than with weights that are rounded to 8 bits again."""
    weights, args = mixed_weights(**own), ragged(prompts())
    want = all_logits(ReferenceBackend(MIXED, weights, 64), *args).clone()
    stored = CpuBackend(MIXED, weights, 64, CpuOptions("stored", num_threads=2, isa=isa))
    rounded = CpuBackend(MIXED, weights, 64, CpuOptions("w8a8", num_threads=2, isa=isa))
    error = relative_error(all_logits(stored, *args).clone(), want)
    assert error < 0.03
    assert error < 0.9 * relative_error(all_logits(rounded, *args).clone(), want)


@pytest.mark.parametrize("isa", AVAILABLE)
@pytest.mark.parametrize("is_thin", [False, True], ids=["", "thin"])
@pytest.mark.parametrize("chunk", [1, 7, 50])
def test_a_file_of_many_kinds_gives_the_same_bits_alone_in_company_and_in_chunks(isa, is_thin, chunk):
    backend = mixed(isa, is_thin=is_thin)
    tokens, blocks = tokens_of(150), list(range(20, 30))
    together = all_logits(backend, *ragged([(tokens_of(33, 2), 0, [1, 2, 3]), (tokens, 0, blocks)])).clone()[33:]
    pieces = [
        all_logits(backend, *ragged([(tokens[at : at + chunk], at, blocks)])).clone()
        for at in range(0, len(tokens), chunk)
    ]
    assert torch.equal(torch.cat(pieces), together)
    assert torch.equal(all_logits(mixed(isa, 3, is_thin), *ragged([(tokens, 0, blocks)])).clone(), together)


def test_a_mixed_file_is_told_for_what_it_is():
    backend = CpuBackend(MIXED, mixed_weights(), 4, CpuOptions("stored"))
    assert backend.held_as == "as the file has them (9 in 4 bits, 3 in 5 bits, 2 in 6 bits, 1 in 8 bits)"
    backend = CpuBackend(MIXED, mixed_weights(**THIN_KINDS), 4, CpuOptions("stored"))
    assert backend.held_as == "as the file has them (1 in 1 bits, 9 in 2 bits, 4 in 3 bits, 1 in 4 bits)"


@EACH_MODEL
def test_int8_keys_and_values_halve_the_cache_and_stay_near_the_reference(name, isa):
    backend, wide = cpu(name, isa, kv_dtype="int8"), cpu(name, isa)
    heads = [(own.num_kv_heads, own.head_dim) for _, own in SPECS[name].cached]
    narrow = sum(count * (dim + 2) for count, dim in heads)  # an fp16 scale per token and head
    assert backend.kv_bytes * 2 * sum(count * dim for count, dim in heads) == wide.kv_bytes * narrow
    got = whole(name, isa, kv_dtype="int8")
    assert relative_error(got, reference(name).full) < 0.03 * slack(name)
    assert relative_error(got, reference(name, "int8").full) < 0.025 * slack(name)
    assert not torch.equal(got, whole(name, isa))


@EACH_MODEL
@pytest.mark.parametrize(("weight_format", "kv_dtype"), FORMATS)
def test_a_sequence_alone_gives_the_same_bits_as_in_company(name, isa, weight_format, kv_dtype):
    backend = cpu(name, isa, weight_format, kv_dtype)
    together = whole(name, isa, weight_format, kv_dtype)
    start = 0
    for part in prompts():
        alone = all_logits(backend, *ragged([part])).clone()
        assert torch.equal(alone, together[start : start + len(part[0])])
        start += len(part[0])


@functools.lru_cache(len(FORMATS))
def in_one_piece(name: str, isa: str, kv_dtype: str) -> torch.Tensor:
    """Logits of a prompt of 150 tokens, computed in one step."""
    return all_logits(cpu(name, isa, kv_dtype=kv_dtype), *ragged([(tokens_of(150), 0, list(range(20, 30)))])).clone()


@EACH_MODEL
@pytest.mark.parametrize("chunk", [1, 3, 16, 50, 128])
@pytest.mark.parametrize("kv_dtype", ["bf16", "int8"])
def test_a_prompt_in_chunks_gives_the_same_bits_as_whole(name, isa, chunk, kv_dtype):
    backend = cpu(name, isa, kv_dtype=kv_dtype)
    tokens, blocks = tokens_of(150), list(range(20, 30))
    # small chunks at the beginning and on both sides of 128 keys, which attention reads as one chunk
    ends = [0, *range(chunk, 20, chunk), *range(121, 137, chunk), 150]
    pieces = [
        all_logits(backend, *ragged([(tokens[at:end], at, blocks[::-1])])).clone()
        for at, end in itertools.pairwise(ends)
    ]
    assert torch.equal(torch.cat(pieces), in_one_piece(name, isa, kv_dtype))


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_the_number_of_threads_does_not_change_the_result(threads):
    spec = SPECS["smollm2 heads"]
    weights, args = random_weights(spec), ragged(prompts())
    want = all_logits(CpuBackend(spec, weights, 64, CpuOptions(num_threads=1)), *args).clone()
    assert torch.equal(all_logits(CpuBackend(spec, weights, 64, CpuOptions(num_threads=threads)), *args).clone(), want)


def test_only_the_asked_rows_are_returned_in_the_asked_order():
    spec = SPECS["llama"]
    backend = CpuBackend(spec, random_weights(spec), 64, CpuOptions(num_threads=2))
    batch, rows = ragged(prompts())
    every = all_logits(backend, batch, rows).clone()
    some = int32([40, 2, 2, 0, 100])
    assert torch.equal(all_logits(backend, batch, some).clone(), every[some.tolist()])


@EACH_MODEL
@pytest.mark.parametrize(("weight_format", "limit"), [("bf16", 0.02), ("w8a8", 0.04)])
def test_states_are_near_the_reference_and_do_not_disturb_logits(name, isa, weight_format, limit):
    backend = cpu(name, isa, weight_format)
    batch, every = ragged(prompts())
    rows, kept = every[::7], every[::-3]
    got = step(backend, batch, rows, [0] * len(rows), kept)
    logits, states = got.full.clone(), got.states
    assert relative_error(states, reference(name).states[kept.tolist()]) < limit * slack(name)
    assert torch.equal(whole(name, isa, weight_format)[::7], logits)
    none = every[:0]
    alone = step(backend, batch, none, [], kept).states
    assert torch.equal(alone, states), "nobody's logits are asked for"


def assert_same_head(got, want, tops):
    """Checks that `got` has the full rows (top 0) of the logits `want`, or their `top` best as a full sort gives."""
    full = iter(got.full)
    for row, top in enumerate(tops):
        if top == 0:
            assert torch.equal(next(full), want[row])
        else:
            order = sorted(range(want.shape[1]), key=lambda token: (-float(want[row, token]), token))[:top]
            assert got.ids[row, :top].tolist() == order
            assert torch.equal(got.values[row, :top], want[row, order])


@pytest.mark.parametrize("isa", AVAILABLE)
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("num_rows", [1, 2, 7, 60])
def test_the_largest_logits_are_those_of_the_whole_row(isa, threads, num_rows):
    spec = SPECS["llama"]  # 101 tokens: the last panel is not full
    backend = CpuBackend(spec, random_weights(spec), 64, CpuOptions(num_threads=threads, isa=isa))
    batch, _ = ragged(prompts()[:7])
    rows = int32(list(range(num_rows)))
    want = all_logits(backend, batch, rows).clone()
    for tops in ([1] * num_rows, [(3 * row) % 40 for row in range(num_rows)], [101, *[0] * (num_rows - 1)]):
        assert_same_head(step(backend, batch, rows, tops), want, tops)


@pytest.mark.parametrize("isa", AVAILABLE)
@pytest.mark.parametrize("num_rows", [1, 20])
def test_of_equal_logits_the_smaller_tokens_are_taken(isa, num_rows):
    spec = SPECS["llama"]
    weights = random_weights(spec)
    weights.values["embed"][50:90] = weights.values["embed"][7]  # the embedding is also the head: 41 equal logits
    backend = CpuBackend(spec, weights, 64, CpuOptions(num_threads=2, isa=isa))
    batch, _ = ragged(prompts()[:5])
    rows = int32(list(range(num_rows)))
    want = all_logits(backend, batch, rows).clone()
    for top in (1, 5, 30, 60):
        assert_same_head(step(backend, batch, rows, [top] * num_rows), want, [top] * num_rows)


@pytest.fixture(scope="module", params=AVAILABLE)
def drawing(request) -> CpuBackend:
    spec = tiny_spec(vocab=1000)
    return CpuBackend(spec, random_weights(spec), 2, CpuOptions(num_threads=1, isa=request.param))


@pytest.mark.parametrize("size", [0.01, 2.0, 8.0])  # scale of the logits: flat, like a model's, sharp
@pytest.mark.parametrize(
    ("top_p", "min_p"), [(1, 0), (0.9, 0), (0.3, 0), (0.999, 0), (1e-46, 0), (1, 0.05), (0.7, 0.2), (0.9, 1)]
)
def test_a_token_is_drawn_as_in_plain_numpy(drawing, size, top_p, min_p):
    generator = np.random.default_rng(5)
    for vocab in (1, 63, 64, 65, 1000):
        for temperature in (0.5, 1.0, 1.7):
            logits = size * generator.standard_normal(vocab, np.float32)
            logits[::7] -= 0 if vocab == 1 else np.inf  # excluded tokens
            for point in (0.0, 0.2, 0.55, 0.83, 0.999):
                want = draw_plain(logits, temperature, top_p, min_p, point)
                assert drawing.draw(logits, temperature, top_p, min_p, point) == want


def test_equally_likely_tokens_come_in_the_order_of_their_ids(drawing):
    logits = np.round(np.random.default_rng(7).standard_normal(3000, np.float32), 1)
    for point in np.linspace(0, 0.999, 40):
        want = draw_plain(logits, 2.0, 0.999, 0, float(point))
        assert drawing.draw(logits, 2.0, 0.999, 0, float(point)) == want


def test_at_the_lowest_temperature_that_is_drawn_with_the_likeliest_token_comes(drawing):
    logits = 8 * np.random.default_rng(6).standard_normal(1000, np.float32)
    drawn = [drawing.draw(logits, GREEDY_BELOW, 1, 0, point) for point in (0.1, 0.5, 0.999)]
    assert drawn == [int(logits.argmax())] * 3


@pytest.mark.parametrize("num_rows", [1, 2, 3, 40])
def test_a_step_chooses_what_each_row_alone_would_have_drawn(num_rows):
    backend = CpuBackend(SPECS["llama"], weights_of("llama"), 64, CpuOptions(num_threads=3))
    batch, every = ragged(prompts())
    rows = every[:: len(every) // num_rows][:num_rows]
    kinds = [(0.7, 1.0, 0.0), (1.0, 0.9, 0.0), (1.3, 1.0, 0.1), (0.2, 0.5, 0.2), (0.0, 1.0, 0.0)]
    tops = [(0, 0, 5, 1)[i // 2 % 4] for i in range(num_rows)]
    rules = [kinds[i % 5] for i in range(num_rows)]
    choices = np.array([(*rule, 2**63 + i, 3 * i) for i, rule in enumerate(rules)], CHOICE)
    head = backend.step(batch, rows, tops, None, choices)
    want, full = [], iter(head.full)
    for i, (top, rule) in enumerate(zip(tops, rules, strict=True)):
        logits = head.values[i, :top] if top else next(full)
        (point,) = uniforms(2**63 + i, 3 * i)
        token = backend.draw(logits, *rule, point) if rule[0] else -1
        token = 0 if top == 1 else token
        want.append(int(head.ids[i, token]) if top and token >= 0 else token)
    assert head.tokens.tolist() == want


@pytest.mark.parametrize("seed", [0, 7, 2**63 + 5, 2**64 - 1])
def test_a_steps_random_numbers_are_the_samplers(drawing, seed):
    for position in (0, 1, 2, 1000, 2**31, 2**40):
        assert drawing._lib.kvl_uniform(seed, position) == uniforms(seed, position)[0]


def test_a_step_that_is_given_the_same_arrays_computes_their_numbers():
    """The backend reuses its call for arrays that it has seen, but reads their new contents."""
    one, other = (CpuBackend(SPECS["llama"], weights_of("llama"), 64, CpuOptions(num_threads=2)) for _ in range(2))
    batch, rows, tops = Ragged(int32([5]), int32([0]), int32([0, 1]), int32([[3, -1]])), int32([0]), [1]
    choices = np.array([(0.0, 1.0, 0.0, 0, 0)], CHOICE)
    for position in range(20):
        batch.pos[0] = position
        batch.block_table[0, position // 16] = 3 + position // 16
        fresh = Ragged(*(array.copy() for array in batch[:4]))
        tokens = one.step(batch, rows, tops, None, choices).tokens
        assert tokens.tolist() == other.step(fresh, rows.copy(), [1], None, choices.copy()).tokens.tolist()
        batch.ids[0] = tokens[0]


def test_drawn_tokens_follow_the_distribution(drawing):
    logits = torch.tensor([0.5, 0.3, 0.2, 0.0]).log().numpy()
    drawn = [drawing.draw(logits, 1.0, 1.0, 0.0, (i + 0.5) / 1000) for i in range(1000)]
    assert [drawn.count(token) for token in range(4)] == [500, 300, 200, 0]
    likely = [drawing.draw(logits, 1.0, 0.8, 0.0, (i + 0.5) / 1000) for i in range(1000)]
    assert [likely.count(token) for token in range(4)] == [625, 375, 0, 0]
    assert likely == sorted(likely)  # the likeliest token comes first


def test_logits_that_are_no_numbers_still_end_in_a_token(drawing):
    for value in (np.nan, -np.inf):
        for top_p in (1.0, 0.9):
            assert 0 <= drawing.draw(np.full(100, value, np.float32), 1.0, top_p, 0.0, 0.5) < 100


def test_what_the_kernels_lack_is_refused_by_name():
    with pytest.raises(ModelError, match="head size 80"):
        CpuBackend(tiny_spec(head_dim=80), random_weights(tiny_spec()), 4)
    with pytest.raises(ModelError, match="rotary embedding of 48 dimensions"):
        CpuBackend(tiny_spec(layers=(Plan(rope_of(48)),)), random_weights(tiny_spec()), 4)
    with pytest.raises(ModelError, match="weight format w2"):
        CpuBackend(tiny_spec(), random_weights(tiny_spec()), 4, CpuOptions(weight_format="w2"))
    with pytest.raises(ModelError, match="KV cache type fp8"):
        CpuBackend(tiny_spec(), random_weights(tiny_spec()), 4, CpuOptions(kv_dtype="fp8"))
    with pytest.raises(ModelError, match="instruction set sse9"):
        CpuBackend(tiny_spec(), random_weights(tiny_spec()), 4, CpuOptions(isa="sse9"))


def test_cosines_and_sines_are_the_nearest_of_float32_angles_on_every_machine():
    rope = SPECS["llama"].layers[0].mixer.rope
    table = rope_table(rope, 300)
    for position in (0, 1, 7, 299):
        angles = np.float32(position) * np.array(rope.inv_freq, np.float32)
        want = [f(float(angle)) for f in (math.cos, math.sin) for angle in angles]
        assert np.array_equal(table[position], np.array(want, np.float32))


def test_progress_ends_at_the_total():
    seen: list[tuple[int, int]] = []
    spec = SPECS["llama"]
    CpuBackend(spec, random_weights(spec), 4, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0
    assert seen == sorted(seen)
