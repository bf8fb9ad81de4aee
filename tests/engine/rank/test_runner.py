"""How a configuration becomes a backend: which one is chosen, and how many blocks its memory holds."""

import pytest
import torch
from msgspec.structs import replace

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest
from kvloom.contract.messages import Batch, NewSeq, Work
from kvloom.contract.request import Delta, Request
from kvloom.contract.sampling import SamplingParams
from kvloom.engine.engine import Engine
from kvloom.rank.fake import ByteTokenizer
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from kvloom.rank.sampler import History, num_candidates
from kvloom.rank.steady import Steady
from tests.support.engine.engines import in_process, run_all, text_of, tokens_of
from tests.support.models.adapters import make_adapter
from tests.support.models.checkpoints import VOCAB_SIZE, save, tiny_model

KV_BYTES = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save(tiny_model("qwen3"), tmp_path_factory.mktemp("model")))  # heads of 32, which the kernels support


def opened(model: str, **fields: object) -> ModelRunner:
    torch.set_num_threads(1)
    config = EngineConfig(model=model, kv_cache_bytes=KV_BYTES, **fields)
    return open_runner(config, [], lambda done, total: None)


@pytest.mark.parametrize(
    ("fields", "token_bytes"),
    [
        ({"backend": "cpu"}, 2 * 32),
        ({"backend": "cpu", "kv_dtype": "bf16"}, 2 * 32),
        ({"backend": "cpu", "kv_dtype": "int8"}, 32 + 2),
        ({"backend": "reference"}, 4 * 32),
        ({"backend": "reference", "kv_dtype": "bf16"}, 2 * 32),
        ({"backend": "reference", "kv_dtype": "int8"}, 32 + 4),
        ({"backend": "reference", "dtype": "bfloat16"}, 2 * 32),
    ],
)
def test_the_memory_for_keys_and_values_holds_more_blocks_the_smaller_they_are(model, fields, token_bytes):
    info = opened(model, **fields).info
    block_bytes = 2 * 2 * 2 * 16 * token_bytes  # layers, keys and values, heads, tokens
    assert (info.backend, info.num_blocks) == (fields["backend"], KV_BYTES // block_bytes)
    assert info.kv_bytes == info.num_blocks * block_bytes


def test_an_unknown_type_of_keys_and_values_is_refused_by_name():
    with pytest.raises(BadRequest, match="kv_dtype: must be one of auto, bf16, int8, got 'int4'"):
        EngineConfig(model="m", kv_dtype="int4")


MIXED = (
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.9, top_k=5, seed=3, max_tokens=12),
    SamplingParams(temperature=0, logprobs=2, max_tokens=12),
    SamplingParams(temperature=0, prompt_logprobs=1, max_tokens=12),
    SamplingParams(temperature=1.2, top_k=3, top_p=0.8, repetition_penalty=1.3, seed=5, max_tokens=12),
    SamplingParams(temperature=0, frequency_penalty=0.9, presence_penalty=0.1, max_tokens=12),
    SamplingParams(temperature=1.0, seed=9, max_tokens=12),
    SamplingParams(temperature=0, min_tokens=12, max_tokens=12),
    SamplingParams(temperature=0, logit_bias={3: 5.0}, max_tokens=12),
)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_answers_are_the_same_with_and_without_all_logits(model, backend, monkeypatch):
    requests = [Request(f"r{i}", tuple(range(1, 9 + i)), params) for i, params in enumerate(MIXED)]
    sizes = {"max_tokens_per_step": 80, "num_speculative_tokens": 0}

    def answers() -> dict[str, list[Delta]]:
        config = EngineConfig(model=model, backend=backend, kv_cache_bytes=KV_BYTES, **sizes)
        runner = open_runner(config, [100], lambda done, total: None)
        engine = Engine(config, in_process(runner, config), ByteTokenizer())
        return run_all(engine, *requests)

    lean = answers()
    counts = [num_candidates(History(list(r.prompt_ids), len(r.prompt_ids), r.params, 0), 1) for r in requests]
    assert [count > 0 for count in counts] == [True, True, False, True, True, True, False, True, False]
    monkeypatch.setattr("kvloom.rank.runner.num_candidates", lambda *args: 0)
    assert lean == answers()


@pytest.mark.parametrize(
    ("backend", "kv_dtype"), [("cpu", "bf16"), ("cpu", "int8"), ("reference", "auto"), ("reference", "int8")]
)
def test_ends_of_a_prompt_that_begin_with_a_copied_block_are_scored_alike(model, backend, kv_dtype):
    before = tuple(range(1, 42))  # two blocks and a half, of which all but the last token are shared
    params = SamplingParams(
        temperature=0, max_tokens=0, logprobs=0, logprob_ids=(7,), prompt_logprobs=0, scored_from=41
    )
    ends = ((5,), (6, 7), (8,) * 12, ())
    requests = [Request(f"r{i}", before + end, params) for i, end in enumerate(ends)]

    def scores(**fields: object) -> dict[str, list[float]]:
        config = EngineConfig(model=model, backend=backend, kv_dtype=kv_dtype, kv_cache_bytes=KV_BYTES, **fields)
        runner = open_runner(config, [100], lambda done, total: None)
        found = run_all(Engine(config, in_process(runner, config), ByteTokenizer()), *requests)
        assert {found[f"r{i}"][0].num_cached_tokens for i in (1, 2, 3)} == {0 if fields else 40}
        return {
            id: [value.logprob for value in (*(delta.prompt_logprobs or ()), *delta.logprobs) if value]
            for id, (delta,) in found.items()
        }

    computed = scores(enable_prefix_cache=False)
    for id, values in scores().items():
        assert values == pytest.approx(computed[id], abs=1e-4)


DRAWN = (
    SamplingParams(temperature=1.0, seed=1, max_tokens=10),
    SamplingParams(temperature=0.7, top_p=0.9, seed=2, max_tokens=10),
    SamplingParams(temperature=0, logprobs=1, max_tokens=10),
    SamplingParams(temperature=1.3, min_p=0.02, seed=3, max_tokens=10),
    SamplingParams(temperature=1.0, seed=4, max_tokens=10, min_tokens=5),
    SamplingParams(temperature=1.0, seed=4, max_tokens=10, frequency_penalty=0.5),
    SamplingParams(temperature=1.0, seed=4, max_tokens=10, logit_bias={7: 3.0}),
    SamplingParams(temperature=1.0, seed=4, max_tokens=10, typical_p=0.8),
    SamplingParams(temperature=1.0, seed=4, max_tokens=10, logprobs=0),
    SamplingParams(temperature=0.9, top_k=7, seed=5, max_tokens=10),
    SamplingParams(temperature=1.0, seed=6, max_tokens=10),
    SamplingParams(temperature=1.1, top_p=0.8, seed=7, max_tokens=10, prompt_logprobs=0),
)


Told = dict[str, tuple[str, list[int], list[object]]]  # text, tokens and log probabilities of each answer


def told(deltas: dict[str, list[Delta]]) -> Told:
    """What answers say, however many tokens came at once: with drafts that follows from the time that steps take."""
    return {
        id: (text_of(found), tokens_of(found), [value for delta in found for value in delta.logprobs])
        for id, found in deltas.items()
    }


@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_what_is_drawn_for_all_at_once_is_what_each_would_have_drawn(model, monkeypatch, num_speculative_tokens):
    requests = [Request(f"r{i}", (1, 2, 1, 2, 3 + i, 1, 2), params) for i, params in enumerate(DRAWN)]
    config = EngineConfig(
        model=model, backend="cpu", kv_cache_bytes=KV_BYTES, num_speculative_tokens=num_speculative_tokens
    )

    def answers() -> Told:
        runner = open_runner(config, [100], lambda done, total: None)
        return told(run_all(Engine(config, in_process(runner, config), ByteTokenizer()), *requests))

    together = answers()
    monkeypatch.setattr("kvloom.rank.runner.choice_of", lambda history, top: None)
    assert together == answers()


PLAIN = (
    SamplingParams(ignore_eos=True, temperature=0, max_tokens=150),
    SamplingParams(ignore_eos=True, temperature=1.0, seed=1, max_tokens=90),
    SamplingParams(ignore_eos=True, temperature=0.7, top_p=0.9, seed=2, max_tokens=140),
    SamplingParams(ignore_eos=True, temperature=1.3, min_p=0.02, seed=3, max_tokens=33, min_tokens=20),
    SamplingParams(ignore_eos=True, temperature=0.9, top_k=7, top_p=0.8, seed=5, max_tokens=160),
    SamplingParams(ignore_eos=True, temperature=1.2, top_k=40, typical_p=0.7, seed=6, max_tokens=20),
    SamplingParams(ignore_eos=True, temperature=0, frequency_penalty=0.4, max_tokens=70),
)


@pytest.mark.parametrize("table_step", [1, 8])
@pytest.mark.parametrize("fields", [{}, {"block_size": 32}, {"run_ahead": False}, {"num_blocks": 18}])
def test_a_batch_that_is_kept_gives_what_one_made_anew_gives(model, monkeypatch, fields, table_step):
    """Sequences arrive late, end, need blocks beyond the table's width, and are preempted where blocks are few."""
    size = {} if "num_blocks" in fields else {"kv_cache_bytes": KV_BYTES}
    config = EngineConfig(model=model, backend="cpu", max_batch=5, num_speculative_tokens=0, **size, **fields)
    requests = [Request(f"r{i}", tuple(range(1, 4 + i)), params) for i, params in enumerate(PLAIN)]
    kept: list[int] = []
    step = Steady.step

    def counted(self, works, *args):
        tokens = step(self, works, *args)
        kept.append(len(tokens))
        return tokens

    def answers(takes_again: bool = True) -> dict[str, list[Delta]]:
        runner = open_runner(config, [100], lambda done, total: None)
        runner.info = replace(runner.info, takes_again=takes_again)
        return run_all(Engine(config, in_process(runner, config), ByteTokenizer()), *requests)

    monkeypatch.setattr(Steady, "step", counted)
    monkeypatch.setattr("kvloom.rank.kv_blocks._TABLE_STEP", table_step)
    together = answers()
    assert len(kept) > 30
    assert max(kept) > 1
    assert together == answers(takes_again=False)
    monkeypatch.setattr("kvloom.rank.runner.choice_of", lambda history, top: None)
    kept.clear()
    assert together == answers() == answers(takes_again=False)
    assert not kept


def test_an_end_of_minus_one_is_none_and_not_the_last_token(model):
    """Model files write -1 for "no end token"; an end token is not drawn before `min_tokens`."""
    config = EngineConfig(model=model, backend="cpu", kv_cache_bytes=KV_BYTES)
    hot = Request("hot", (1, 2, 3), SamplingParams(min_tokens=200, temperature=2.0, seed=7, max_tokens=200))

    def tokens(eos_ids: list[int]) -> list[int]:
        runner = open_runner(config, eos_ids, lambda done, total: None)
        deltas = run_all(Engine(config, in_process(runner, config), ByteTokenizer()), hot)["hot"]
        return [id for delta in deltas for id in delta.token_ids]

    assert VOCAB_SIZE - 1 in tokens([])
    assert VOCAB_SIZE - 1 not in tokens([VOCAB_SIZE - 1])
    assert tokens([-1]) == tokens([])


def test_a_batch_that_is_kept_is_that_of_its_own_sequences_alone(model):
    """Two sequences of the same length take turns: each gets the tokens that it gets without the other."""

    def chosen(turns: list[int]) -> dict[int, list[int]]:
        runner = opened(model, backend="cpu")
        prompts = {1: [3, 4, 5], 2: [9, 8, 7]}
        new = [NewSeq(id, prompt, MIXED[0], 0) for id, prompt in prompts.items()]
        works = [Work(id, 0, 3, 0, [id]) for id in prompts]
        found = {sample.id: [sample.token_id] for sample in runner.run(Batch(new, works, [])).samples}
        for id in turns:
            output = runner.run(Batch([], [Work(id, 2 + len(found[id]), 1, 1, [])], []))
            ((of, (sample,)),) = output.by_sequence([id]).items()
            assert of == id
            found[id].append(sample.token_id)
        return found

    assert chosen([1, 2] * 6) == chosen([1] * 6 + [2] * 6)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_step_that_is_sent_as_again_is_as_if_written_out_also_when_an_adapter_was_loaded(model, tmp_path, backend):
    blocks, prompt = (5, 2, 7, 3), [3, 4, 5]

    def chosen(is_short: bool) -> list[int]:
        runner = opened(model, backend=backend)
        size = runner.info.block_size
        adapter = make_adapter(tmp_path, runner._backend.whole_spec.tensor_shapes(), rank=2)
        first = Batch([NewSeq(1, prompt, MIXED[0], 0)], [Work(1, 0, len(prompt), 0, [blocks[0]])], [])
        found = [sample.token_id for sample in runner.run(first).by_sequence([1])[1]]
        for start in range(len(prompt), 3 * size):
            new = [blocks[start // size]] if start % size == 0 else []
            works = [Work(1, start, 1, -(-start // size), new)]
            batch = Batch([], works if new or not is_short else [], [], again=is_short)
            found += [sample.token_id for sample in runner.run(batch).by_sequence([1])[1]]
            if start == size + 3:
                runner.load_adapter(1, str(adapter))
        return found

    assert chosen(is_short=True) == chosen(is_short=False)


def test_work_behind_a_token_that_was_not_chosen_is_left_out(model):
    """The engine sends such work before it knows the token; the work's blocks replace those of the work before it."""
    runner = opened(model, backend="reference")
    prompt, params = [3, 4, 5], MIXED[0]

    def chosen(new: list[NewSeq], *works: Work) -> list[tuple[int, int]]:
        return [(sample.id, sample.token_id) for sample in runner.run(Batch(new, list(works), [])).samples]

    ((_, token),) = chosen([NewSeq(1, prompt, params, 0)], Work(1, 0, 3, 0, [0]))
    late = Work(1, 4, 1, 1, [7])
    assert chosen([], late) == []
    assert chosen([NewSeq(2, prompt, params, 0)], late, Work(2, 0, 3, 0, [1])) == [(2, token)]
    (first, second) = chosen([], Work(1, 3, 1, 1, []), Work(2, 3, 1, 1, []))
    assert first[1] == second[1]
    assert [id for id, _ in chosen([], late)] == [1]
