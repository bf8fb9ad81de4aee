"""The reference backend against transformers (fp32), and the equalities that a paged cache must keep."""

import pytest
import torch

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.rank.kernels.backend import Ragged
from kvloom.rank.kernels.reference import ReferenceBackend, ReferenceOptions
from tests.support.models.checkpoints import TINY_MODELS, VOCAB_SIZE, generate, run_step, save, tiny_model

from .models import all_logits, int32, ragged, step

PROMPT = torch.randint(0, VOCAB_SIZE, (40,), generator=torch.Generator().manual_seed(1)).tolist()
OTHER = torch.randint(0, VOCAB_SIZE, (17,), generator=torch.Generator().manual_seed(2)).tolist()


def open_backend(folder, dtype=torch.float32) -> ReferenceBackend:
    checkpoint = open_checkpoint(folder)
    return ReferenceBackend(checkpoint.spec, checkpoint.weights, 32, ReferenceOptions(dtype=dtype))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> ReferenceBackend:
    return open_backend(save(tiny_model("llama"), tmp_path_factory.mktemp("llama")))


def whole_prompt() -> Ragged:
    return ragged([(PROMPT, 0, [5, 2, 9])])[0]


@pytest.mark.parametrize("name", TINY_MODELS)
def test_logits_and_greedy_tokens_are_those_of_transformers(name, tmp_path):
    model = tiny_model(name)
    backend = open_backend(save(model, tmp_path))
    with torch.no_grad():
        wanted = model(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(run_step(backend, [PROMPT], [[5, 2, 9]]), wanted, atol=2e-4, rtol=1e-4)
    answer = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()
    assert generate(backend, PROMPT, 24, [7, 3, 30, 11]) == answer


def test_a_sequence_is_bit_for_bit_the_same_in_a_batch_and_in_other_blocks(llama):
    alone = run_step(llama, [PROMPT], [[5, 2, 9]])
    batched = run_step(llama, [OTHER, PROMPT, OTHER], [[1, 3], [8, 4, 6], [10, 11]])
    assert torch.equal(batched[len(OTHER) : len(OTHER) + len(PROMPT)], alone)


@pytest.mark.parametrize("cut", [1, 13, 16, 39])
def test_a_prompt_in_two_chunks_gives_the_same_logits(llama, cut):
    whole = run_step(llama, [PROMPT], [[5, 2, 9]])
    first = run_step(llama, [PROMPT[:cut]], [[1, 0, 4]])
    second = run_step(llama, [PROMPT[cut:]], [[1, 0, 4]], [cut])
    torch.testing.assert_close(torch.cat([first, second]), whole, atol=1e-4, rtol=1e-4)


def test_only_the_rows_asked_for_are_returned(llama):
    everything = run_step(llama, [PROMPT], [[5, 2, 9]])
    assert torch.equal(all_logits(llama, whole_prompt(), int32([39, 3])), everything[[39, 3]])


@pytest.mark.parametrize("name", ["llama", "mistral, window of 7", "qwen2", "qwen3"])
def test_states_are_the_last_hidden_states_of_transformers(name, tmp_path):
    model = tiny_model(name)
    backend = open_backend(save(model, tmp_path))
    with torch.no_grad():
        wanted = model.model(torch.tensor([PROMPT])).last_hidden_state[0]
    kept = [39, 0, 7, 7]
    states = step(backend, whole_prompt(), int32([]), [], int32(kept)).states
    torch.testing.assert_close(states, wanted[kept], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("top", [1, 2, 17, VOCAB_SIZE])
def test_the_largest_logits_are_those_of_the_whole_row(llama, top):
    everything = run_step(llama, [PROMPT], [[5, 2, 9]])
    head = step(llama, whole_prompt(), int32([39, 3, 7]), [top, 0, top])
    assert torch.equal(head.full, everything[[3]])
    for row, token in ((0, 39), (2, 7)):
        values, ids = everything[token].sort(descending=True, stable=True)
        assert torch.equal(head.values[row], values[:top])
        assert head.ids[row].tolist() == ids[:top].tolist()


def test_bfloat16_is_near(tmp_path):
    folder = save(tiny_model("llama", initializer_range=0.05), tmp_path)
    exact = run_step(open_backend(folder), [PROMPT], [[5, 2, 9]])
    near = run_step(open_backend(folder, torch.bfloat16), [PROMPT], [[5, 2, 9]])
    assert (near - exact).abs().max() < 0.02 * exact.abs().max()


def test_loading_reports_progress_and_size(tmp_path):
    checkpoint = open_checkpoint(save(tiny_model("qwen2"), tmp_path))
    seen: list[tuple[int, int]] = []
    backend = ReferenceBackend(checkpoint.spec, checkpoint.weights, 4, progress=lambda *step: seen.append(step))
    assert seen[-1] == (backend.weight_bytes, backend.weight_bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert backend.kv_bytes == 2 * 2 * 4 * 16 * 2 * 16 * 4  # layers, k and v, blocks, tokens, heads, head_dim, bytes
