"""Which model is served, and in which format, when the command line leaves it open."""

import pytest

from kvloom.server.config.settings import Settings
from kvloom.server.run.launch import resolve_models


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, "bf16"),
        ({"backend": "cpu", "kv_dtype": "int8"}, "bf16"),
        ({"weight_format": "auto"}, "auto"),
        ({"weight_format": "w8a8"}, "w8a8"),
        ({"dtype": "float32"}, "auto"),
        ({"backend": "torch"}, "auto"),
        ({"device": "cuda"}, "auto"),
        ({"model": "smollm2"}, "auto"),
    ],
    ids=str,
)
def test_a_model_that_nobody_named_is_served_for_its_answers(smollm2_path, said, expected):
    settings = Settings({"models": [dict(said)]})
    resolve_models(settings)
    [model] = settings.models
    assert (model["model"], model["name"]) == (str(smollm2_path), "smollm2")
    assert model.get("weight_format", "auto") == expected
