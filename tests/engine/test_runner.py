"""How a configuration becomes a backend: which one, and how many blocks its memory holds."""

import pytest
import torch

from kvloom.engine.config import EngineConfig
from kvloom.engine.errors import BadRequest
from kvloom.engine.runner import ModelRunner, open_runner
from tests.support.checkpoints import save, tiny_model

KV_BYTES = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(save(tiny_model("qwen3"), tmp_path_factory.mktemp("model")))  # heads of 32, which the kernels have


def opened(model: str, **fields: object) -> ModelRunner:
    torch.set_num_threads(1)
    config = EngineConfig(model=model, kv_cache_bytes=KV_BYTES, **fields)  # type: ignore[arg-type]
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
