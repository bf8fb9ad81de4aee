"""The estimate of a model's memory from its shape, against what the backends allocate."""

from dataclasses import replace

import pytest

from kvloom.checkpoints import footprint
from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.quantized.blocks import form_of
from kvloom.contract.config import EngineConfig
from kvloom.rank.kernels.cpu import CpuBackend, CpuOptions
from kvloom.rank.loading import choose_backend, open_runner
from tests.engine.kernels.models import MIXED, THIN_KINDS, mixed_weights
from tests.engine.weights.test_gguf import write
from tests.support.models.checkpoints import save, tiny_model


@pytest.fixture(scope="module", params=["llama", "llama, tied"])
def folder(request, tmp_path_factory):
    return save(tiny_model(request.param, head_dim=32, vocab_size=1024), tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kv_dtype", ["auto", "bf16", "int8"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_token_of_kv_is_what_the_backend_takes(folder, backend, kv_dtype):
    config = EngineConfig(model=str(folder), backend=backend, kv_dtype=kv_dtype, num_blocks=8)
    info = open_runner(config, [], lambda done, total: None).info
    token_bytes = footprint.kv_token_bytes(config, backend, open_checkpoint(folder).spec)
    assert info.kv_bytes == token_bytes * info.num_blocks * info.block_size


@pytest.mark.parametrize(("backend", "weight_format"), [("cpu", "w8a8"), ("cpu", "bf16"), ("reference", "auto")])
def test_the_weights_are_what_the_backend_takes(folder, backend, weight_format):
    config = EngineConfig(model=str(folder), backend=backend, weight_format=weight_format, num_blocks=8)
    info = open_runner(config, [], lambda done, total: None).info
    assert info.weight_bytes == pytest.approx(
        footprint.weight_bytes(config, backend, open_checkpoint(folder).spec, open_checkpoint(folder).weights.form),
        rel=0.03,
    )


def test_what_auto_means_is_what_is_opened(folder):
    config = EngineConfig(model=str(folder), num_blocks=8)
    opened = open_runner(config, [], lambda done, total: None).info.backend
    assert choose_backend(config, open_checkpoint(folder).spec) == opened


@pytest.mark.parametrize("own", [{}, {"embed": ""}, {"layers.0.o": "", "layers.1.up": "q8_0"}, THIN_KINDS])
def test_a_quantised_file_takes_what_its_forms_take(own):
    weights = mixed_weights(**own)
    backend = CpuBackend(MIXED, weights, 4, CpuOptions("stored"))
    config = EngineConfig(model="m", weight_format="stored")
    assert backend.weight_bytes == pytest.approx(footprint.weight_bytes(config, "cpu", MIXED, weights.form), rel=0.03)


@pytest.mark.parametrize(
    ("fields", "kind", "wanted"),
    [
        ({}, "q4_k", "bf16"),
        ({}, "", "bf16"),
        ({}, "int8_channel", "stored"),
        ({"weight_format": "stored"}, "q4_k", "stored"),
        ({"weight_format": "stored"}, "", "w8a8"),
        ({"dtype": "bfloat16"}, "q4_k", "bf16"),
        ({"weight_format": "w8a8"}, "q4_k", "w8a8"),
        ({"weight_format": "w4a8"}, "", "w4a8"),
    ],
)
def test_a_small_model_is_held_in_bfloat16_unless_something_else_is_asked_for(fields, kind, wanted):
    """So small a model's answers are tipped by activations in 8 bits, whichever way it was named."""
    form = kind if kind == "int8_channel" else form_of(kind)
    assert footprint.weight_format(EngineConfig(model="m", **fields), MIXED, lambda name: form) == wanted


@pytest.mark.parametrize(("kind", "wanted"), [("q4_k", "stored"), ("", "w8a8")])
def test_a_larger_model_keeps_what_its_file_has_and_rounds_the_rest_to_8_bits(kind, wanted):
    large = replace(MIXED, vocab_size=footprint.SMALL_WEIGHTS // MIXED.hidden)
    assert footprint.weight_format(EngineConfig(model="m"), large, lambda name: form_of(kind)) == wanted


def test_a_quantised_file_is_kept_as_it_is_on_request(tmp_path):
    path = write(tmp_path / "m.gguf", tiny_model("llama", head_dim=32), "llama", quantised="Q4_0")
    stored = EngineConfig(model=str(path), num_blocks=8, weight_format="stored")
    info = open_runner(stored, [], lambda done, total: None).info
    assert info.held_as == "as the file has them (16 in 4 bits)"
    rounded = EngineConfig(model=str(path), num_blocks=8, weight_format="w8a8")
    assert open_runner(rounded, [], lambda done, total: None).info.held_as == "in 8 bits"
