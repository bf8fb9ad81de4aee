"""Settings of text-to-image models, which differ from those of language models."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvloom.contract.errors import BadRequest
from kvloom.server.config.devices import device_settings
from kvloom.server.serving.pictures.card import PictureCard

# settings that only one kind of model has, and their keys
_OF_LANGUAGE = {
    "lora_modules": "loraModules",
    "tool_parser": "toolParser",
    "reasoning_parser": "reasoningParser",
    "generation_config": "generationConfig",
    "parses_special_text": "parseSpecialTokens",
    "weight_format": "weightFormat",
    "kv_dtype": "kvCacheDtype",
    "snapshot_share": "snapshotShare",
    "num_speculative_tokens": "speculate",
    "draft_model": "draftModel",
}
_NEUTRAL: tuple[object, ...] = (None, "auto", False, 0, -1, [])  # values without effect
_OF_PICTURES = {"image_steps": "imageSteps", "image_guidance": "imageGuidance", "max_image_pixels": "maxImagePixels"}


def picture_card(own: Mapping[str, Any], shared: Mapping[str, Any], index: int = 0) -> PictureCard:
    """The card from a model's own settings, which override those of all. Raises BadRequest for settings of language
    models.

    `index`: the model's number in the configuration, which selects its devices.
    """
    name = own.get("name") or Path(own["model"]).name
    for setting, key in _OF_LANGUAGE.items():
        if own.get(setting) not in _NEUTRAL:
            raise BadRequest(key, f"is of language models; {name} makes pictures")
    if own.get("world_size", 1) != 1:
        raise BadRequest("worldSize", f"must be 1 for {name}, which makes pictures, got {own['world_size']}")
    model = {**shared, **own}
    given = {
        "time_limit_s": "time_limit_s",
        "steps": "image_steps",
        "guidance": "image_guidance",
        "max_pixels": "max_image_pixels",
    }
    more = {field: model[setting] for field, setting in given.items() if setting in model}
    if "device_ids" in model:
        more |= _devices(model, index)
    else:
        more["device"] = model.get("device", "cpu")
    return PictureCard(name, model["model"], dtype=model.get("dtype", "auto"), **more)


def _devices(model: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Its only device: a share of the CPU's cores, or the number of another device. Raises BadRequest."""
    kind = model.get("device", "cpu").partition(":")[0]
    found = device_settings(model["device_ids"], index, kind)
    if kind != "cpu":
        return {"device": f"{kind}:{found['device_ids'][0]}"}
    return {"device": kind, "cores": tuple(*found.get("rank_cores", ()))}


def check_language(model: Mapping[str, Any]) -> None:
    """Raises BadRequest for settings that only text-to-image models have."""
    for setting, key in _OF_PICTURES.items():
        if setting in model:
            raise BadRequest(key, "is of text-to-image models; this is a language model")
