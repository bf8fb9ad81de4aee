"""Which model is served when the command line leaves it open."""

import pytest

from kvloom.contract.errors import ModelError
from kvloom.server.config.settings import Settings
from kvloom.server.run.launch import resolve_models


@pytest.mark.parametrize(
    "said", [{}, {"backend": "cpu", "kv_dtype": "int8"}, {"weight_format": "w8a8"}, {"model": "smollm2"}], ids=str
)
def test_a_model_that_nobody_named_is_the_demo_model_with_the_settings_of_any_other(smollm2_path, said):
    settings = Settings({"models": [dict(said)]})
    resolve_models(settings)
    [model] = settings.models
    assert (model["model"], model["name"]) == (str(smollm2_path), "smollm2")
    assert model.get("weight_format") == said.get("weight_format")


def test_a_draft_model_is_found_as_a_model_is(smollm2_path):
    settings = Settings({"models": [{"model": "smollm2", "draft_model": "smollm2"}]})
    resolve_models(settings)
    (card,) = settings.build().models
    assert card.engine.draft_model == card.engine.model == str(smollm2_path)
    with pytest.raises(ModelError, match="draftModel: 'nowhere' is neither a folder"):
        resolve_models(Settings({"models": [{"model": "smollm2", "draft_model": "nowhere"}]}))


def test_a_models_own_head_is_no_file(smollm2_path):
    settings = Settings({"models": [{"model": "smollm2", "draft_model": "mtp"}]})
    resolve_models(settings)
    (card,) = settings.build().models
    assert card.engine.draft_model == "mtp"
