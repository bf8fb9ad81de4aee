"""Assistants of Gemma 4: what one guesses is what transformers makes of the same states and keys, changes no answer,
and is right where the assistant is.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from safetensors.torch import load_file, save_file

from kvloom.checkpoints import footprint
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.families import FAMILIES
from kvloom.checkpoints.finding import ASSISTANTS
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ModelError
from kvloom.contract.messages import BY_MODEL, StepOutput, Work
from kvloom.contract.request import Request
from kvloom.engine.engine import Engine
from kvloom.rank.assistant_drafter import AssistantDrafter
from kvloom.rank.byte_tokenizer import ByteTokenizer
from kvloom.rank.loading import open_runner
from kvloom.rank.runner import ModelRunner
from tests.engine.weights.test_gguf import gguf_name, sizes_of, write
from tests.support.engine.drafts import check_behind_pool, check_chained, draft_always
from tests.support.engine.engines import drain, engine_over, in_process, run_all, tokens_of
from tests.support.models import gemma4_gguf
from tests.support.models.assistants import FROM_KEYS, KINDS, SHARING, UNIFIED, Pair, chained
from tests.support.models.checkpoints import save, tiny_model

from .test_draft_model import DRAFTS, prompt, requests, told
from .test_draft_model import KINDS as PARAMS
from .test_guess_heads import noted

BACKENDS = ["cpu", "reference"]
NUM_CHAINED = 40
CHAINED = "chained"


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {**{name: Pair(name) for name in KINDS}, CHAINED: chained(NUM_CHAINED)}


@pytest.fixture(scope="module")
def folders(pairs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    path = tmp_path_factory.mktemp("pairs")
    return {name: pair.save(path / name) for name, pair in pairs.items()}


def opened(folders: tuple[str, str], is_assisted: bool = True, backend: str = "cpu", **fields: object) -> ModelRunner:
    torch.set_num_threads(1)
    model, assistant = folders
    sizes = {"num_blocks": 40, "max_seq_len": 200, "num_speculative_tokens": DRAFTS, **fields}
    config = EngineConfig(model=model, draft_model=assistant if is_assisted else "", backend=backend, **sizes)
    return open_runner(config, [100], lambda done, total: None)


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Whatever it costs, all that the assistant guesses is drafted. Returns what an engine needs for it."""
    draft_always(monkeypatch)
    return {"num_speculative_tokens": DRAFTS, "model": "m", "draft_model": "d", "backend": "auto"}


# -- what it computes


def in_gguf(path: Path, pair: Pair) -> Path:
    """The assistant as llama.cpp's converter writes it."""
    arch, own = "gemma4-assistant", pair.assistant.model
    writer = gguf.GGUFWriter(path, arch)
    said = gemma4_gguf.metadata_of(own.config) | {f"gemma4__{k}": v for k, v in sizes_of(own, "gemma4").items()}
    said |= {"gemma4__embedding_length_out": pair.assistant.config.backbone_hidden_size}
    said |= {"gemma4__nextn_predict_layers": own.config.num_hidden_layers}
    for key, value in said.items():
        item = gguf.GGUFValueType.get_type(value[0]) if isinstance(value, list) else None
        name = key.replace("gemma4", arch, 1).replace("__", ".")
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value), item)
    writer.add_tensor("rope_freqs.weight", gemma4_gguf.rope_divisors(own.config))
    for key, value in pair.assistant.state_dict().items():
        name = f"nextn.{key}" if "projection" in key else gguf_name(key, "gemma4")
        if key != "lm_head.weight":
            writer.add_tensor(name, np.ascontiguousarray(value.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits_of(runner: ModelRunner, patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of all that its assistant computes from now on, each [sequences, vocab]."""
    assert isinstance(runner._drafter, AssistantDrafter)
    backend, found = runner._drafter._backend, list[torch.Tensor]()
    own = backend.step

    def step(batch, rows, tops, states, choices):
        head = own(batch, rows, [0] * len(tops), states)
        found.append(torch.from_numpy(head.full.copy()))
        return own(batch, rows, tops, states, choices)

    patch.setattr(backend, "step", step)
    return found


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "folder") for name in KINDS), (SHARING, "GGUF"), (FROM_KEYS, "GGUF")]
)
def test_its_logits_are_those_of_transformers(name, kind, pairs, folders, drafting, monkeypatch, tmp_path):
    """In float32; of several tokens in a row, each made of the state of the one before."""
    paths, pair = folders[name], pairs[name]
    if kind == "GGUF":
        paths = str(write(tmp_path / "m.gguf", pair.model, "gemma4")), str(in_gguf(tmp_path / "a.gguf", pair))
    runner = opened(paths, backend="reference", dtype="float32")
    texts, logits = noted(runner), logits_of(runner, monkeypatch)
    run_all(engine_over(runner, **drafting), Request("a", prompt(40), PARAMS[0]))
    assert len(texts) > 10
    for text, draft in texts:
        wanted = pair.chain(text, len(draft))[1]
        found = torch.cat([logits.pop(0) for _ in draft])
        torch.testing.assert_close(found, wanted, atol=3e-4, rtol=1e-4)
    assert not logits


@pytest.mark.parametrize(("weight_format", "close"), [("bf16", 0.04), ("w8a8", 0.1)])
@pytest.mark.parametrize("name", KINDS)
def test_the_kernels_compute_it_too(name, weight_format, close, pairs, folders, drafting, monkeypatch):
    """The first guess behind each text; both models in this format."""
    monkeypatch.setattr("kvloom.rank.loading.footprint.weight_format", lambda *args: weight_format)
    runner = opened(folders[name])
    texts, logits = noted(runner), logits_of(runner, monkeypatch)
    run_all(engine_over(runner, **drafting), Request("a", prompt(40), PARAMS[0]))
    errors = []
    for text, draft in texts:
        found, wanted = [logits.pop(0) for _ in draft], pairs[name].chain(text, 1)[1]
        errors.append(float((found[0] - wanted).norm() / wanted.norm()))
    assert len(errors) > 10
    assert sorted(errors)[len(errors) // 2] < close


@pytest.mark.parametrize(
    "fields",
    [{}, {"max_tokens_per_step": 7, "max_batch": 4}, {"run_ahead": False}],
    ids=["", "in chunks", "step by step"],
)
@pytest.mark.parametrize("name", KINDS)
def test_it_guesses_what_transformers_does_in_company(name, pairs, folders, drafting, fields):
    """Behind prompts that were computed at once or in chunks, and behind guesses that were right or wrong."""
    runner = opened(folders[name], backend="reference")
    drafts = noted(runner)
    engine = engine_over(runner, **drafting, **fields)
    run_all(engine, Request("a", prompt(23), PARAMS[0]), Request("b", prompt(40, 5), PARAMS[5]))
    assert len(drafts) > 10
    for text, draft in drafts:
        assert draft == pairs[name].guesses(text, DRAFTS)[: len(draft)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_that_looks_at_states_alone_is_always_right(folders, backend, drafting):
    check_chained(engine_over(opened(folders[CHAINED], backend=backend), **drafting), PARAMS[0])


def test_guesses_of_others_come_before_its_own(folders, drafting):
    """The engine's draft begins with tokens that are given: it goes on behind them."""
    runner = opened(folders[CHAINED])
    engine = engine_over(runner, **drafting)
    engine.add(Request("a", tuple(range(1, 13)), PARAMS[0]))
    engine.step()
    engine.step()
    assert isinstance(runner._drafter, AssistantDrafter)
    (seq,), (id,) = runner._drafter._seqs.values(), runner._states
    known = runner._text_of(id)
    draft = [known[-1] + 1, known[-1] + 2, BY_MODEL, BY_MODEL]
    work = Work(id, len(known) - 1, 1 + len(draft), len(seq.blocks), [], draft)
    (done,) = runner._drafter.draft([work], runner._text_of, 64, StepOutput([], [], 0.0))
    assert done.draft == [known[-1] + count for count in (1, 2, 3, 4)]


# -- no answer changes


@pytest.mark.parametrize("name", [*KINDS, CHAINED])
@pytest.mark.parametrize("backend", BACKENDS)
def test_answers_are_those_without_it(folders, name, backend, drafting):
    """In float32 of torch numbers differ in their last digits from shape to shape: there tokens are compared."""
    parts = slice(None) if backend == "cpu" else slice(1)
    want = told(run_all(engine_over(opened(folders[name], False, backend)), *requests()), parts)
    engine = engine_over(opened(folders[name], True, backend), **drafting)
    assert told(run_all(engine, *requests()), parts) == want
    alone = engine_over(opened(folders[name], True, backend), **drafting)
    assert {id: one for each in requests() for id, one in told(run_all(alone, each), parts).items()} == want
    assert engine.stats().total_draft_tokens > 0


@pytest.mark.usefixtures("swaps_always")
@pytest.mark.parametrize("fields", [{"max_preempt": None}, {"num_host_blocks": 30}, {"run_ahead": False}])
@pytest.mark.parametrize("name", [SHARING, CHAINED])
def test_preemption_swaps_and_the_schedule_change_no_answer(folders, drafting, name, fields):
    want = told(run_all(engine_over(opened(folders[name], False)), *requests()))
    sizes = {"num_blocks": 14, "num_host_blocks": fields.get("num_host_blocks", 0)}
    engine = engine_over(opened(folders[name], **sizes), **drafting, **fields)
    assert told(run_all(engine, *requests())) == want
    assert engine.stats().total_preemptions > 0


def test_answers_go_on_after_a_crash(folders, drafting):
    paths = folders[CHAINED]
    want = {id: one[0] for id, one in told(run_all(engine_over(opened(paths, False)), *requests())).items()}
    engine = engine_over(opened(paths), **drafting)
    found: dict[str, list[int]] = {id: [] for id in want}
    for request in requests():
        engine.add(request)
    for _ in range(5):
        for delta in engine.step():
            found[delta.request_id] += delta.token_ids
    engine._executor = in_process(opened(paths), engine.config)
    for delta in (*engine.suspend(), *engine.resume({})):
        found[delta.request_id] += delta.token_ids
    for id, deltas in drain(engine).items():
        found[id] += tokens_of(deltas)
    assert found == want


def test_with_a_pool_it_reads_what_was_loaded(folders, drafting):
    """It needs no keys of its own, so that nothing is computed again for it."""
    model, assistant = folders[CHAINED]
    asked = Request("a", tuple(i % NUM_CHAINED for i in range(150)), PARAMS[0])
    want = tokens_of(run_all(engine_over(opened(folders[CHAINED], False)), asked)["a"])
    sizes = {"num_blocks": 40, "max_seq_len": 200, "num_speculative_tokens": DRAFTS, "backend": "cpu"}
    check_behind_pool(EngineConfig(model=model, draft_model=assistant, **sizes), asked, want)


@pytest.fixture(scope="module")
def runners(folders) -> dict[tuple[str, bool], ModelRunner]:
    return {(name, is_on): opened(folders[name], is_on) for name in (SHARING, CHAINED) for is_on in (False, True)}


@settings(max_examples=20)
@given(
    name=st.sampled_from([SHARING, CHAINED]),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    num_blocks=st.integers(8, 30),
    max_tokens=st.integers(8, 60),
    kind=st.sampled_from(PARAMS[:4]),
    run_ahead=st.booleans(),
)
def test_no_schedule_changes_an_answer(runners, name, lengths, num_blocks, max_tokens, kind, run_ahead):
    """Each runner keeps what earlier engines have left in its blocks. Prompts begin alike, so prefixes are found."""
    asked = [Request(f"r{i}", prompt(length, 5 * i % 2), kind) for i, length in enumerate(lengths)]
    want = told(run_all(engine_over(runners[name, False]), *asked))
    own = {"num_speculative_tokens": DRAFTS, "model": "m", "draft_model": "d", "backend": "auto"}
    config = EngineConfig(**own, max_batch=4, max_tokens_per_step=max_tokens, run_ahead=run_ahead)
    executor = in_process(runners[name, True], config)
    executor.info = structs.replace(executor.info, num_blocks=num_blocks)
    with pytest.MonkeyPatch.context() as patch:
        draft_always(patch)
        assert told(run_all(Engine(config, executor, ByteTokenizer()), *asked)) == want


# -- what is told and refused


def test_files_are_told_apart_by_the_names_of_all_families_that_assist():
    assert {name for name, family in FAMILIES.items() if getattr(family, "is_assistant", False)} == set(ASSISTANTS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_it_takes_no_memory_for_keys(folders, backend):
    budget = {"num_blocks": None, "kv_cache_bytes": 1 << 20, "backend": backend}
    plain, own = opened(folders[SHARING], False, **budget).info, opened(folders[SHARING], **budget).info
    assert own.num_blocks == plain.num_blocks
    assert own.kv_bytes == plain.kv_bytes
    weights, kept = own.draft_bytes
    assert kept == 0
    config, checkpoint = EngineConfig(model="m", weight_format=footprint.STORED), open_checkpoint(folders[SHARING][1])
    planned = footprint.weight_bytes(config, backend, checkpoint.spec, checkpoint.weights.form)
    assert planned <= weights <= 1.25 * planned, "kernels pad the rows and columns of matrices this small"


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        ({"vocab_size": 96}, "vocab_size is 96, that of the model 128"),
        ({"head_dim": 64}, "head_dim is 64, that of the model 32"),
        ({"num_key_value_heads": 1}, "num_key_value_heads is 1, that of the model 2"),
        ({"sliding_window": 9}, "sliding_window is 9, that of the model 7"),
        ({"global_head_dim": 32}, "head_dim is 32, that of the model 64"),
    ],
)
def test_one_that_does_not_fit_is_refused_by_the_field(folders, own, sentence, tmp_path):
    other = Pair(SHARING, own)
    paths = folders[SHARING][0], str(save(other.assistant, tmp_path / "a", "1GB"))
    with pytest.raises(ModelError, match=rf"draft_model: .*: {sentence}"):
        opened(paths)


def changed(folder: str, to: Path, **text: object) -> str:
    """The folder with other fields of its text's configuration, "" = of the whole."""
    to.mkdir()
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    config["text_config"] |= text
    (to / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(load_file(Path(folder) / "model.safetensors"), to / "model.safetensors")
    return str(to)


def test_ropes_and_models_of_other_kinds_are_refused(folders, tmp_path):
    model, assistant = folders[SHARING]
    ropes = json.loads((Path(assistant) / "config.json").read_text(encoding="utf-8"))["text_config"]["rope_parameters"]
    ropes["sliding_attention"]["rope_theta"] = 5e4
    with pytest.raises(ModelError, match="rope_parameters: those of layer 0 are not those of the model's layer 1"):
        opened((model, changed(assistant, tmp_path / "ropes", rope_parameters=ropes)))
    with pytest.raises(ModelError, match=r"it assists models of gemma4, and .* is of qwen3"):
        opened((str(save(tiny_model("qwen3"), tmp_path / "qwen")), assistant))
    wide = save(tiny_model(SHARING, hidden_size=96), tmp_path / "wide")
    with pytest.raises(ModelError, match="backbone_hidden_size is 64, that of the model 96"):
        opened((str(wide), assistant))
    full = save(tiny_model(UNIFIED, layer_types=["full_attention"] * 2), tmp_path / "full")
    with pytest.raises(ModelError, match="layer_types: layer 0 has a window, and no layer of the model with keys has"):
        opened((str(full), assistant))
    with pytest.raises(ModelError, match="neither experts, nor layers' inputs"):
        opened((model, changed(assistant, tmp_path / "mlps", use_double_wide_mlp=True)))


def test_it_answers_nothing_itself(folders):
    with pytest.raises(ModelError, match=r"an assistant guesses for a Gemma 4 .* and answers nothing itself"):
        opened(folders[FROM_KEYS][::-1], False)
