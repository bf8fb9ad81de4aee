"""`kvloom serve | pull | api-key`. Options and wiring, no logic."""

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Any

import typer

from kvloom.checkpoints.demo_models import MODELS
from kvloom.server.config.backends import named_backend
from kvloom.server.config.given import KEYS, check_given
from kvloom.server.config.settings import Settings, lora_module
from kvloom.server.run.launch import DEMO_MODEL, fetch, launch, read_settings
from kvloom.server.run.options import OPTIONS, sentence, with_options
from kvloom.server.secure.api_keys import hash_key, new_key, read_hashes

# options that are more than a setting
_MADE = ("config", "image_model", "vllm", "backend_type", "api_key_file", "lora_modules")


@with_options
def serve(
    model: Annotated[str | None, typer.Argument(help=sentence(KEYS["model"]))] = None,
    **flags: Any,
) -> None:
    """Serve models over HTTP. Without MODEL, the demo model is fetched and served."""
    settings = read_settings(flags["config"], os.environ)
    _override(settings, model, flags)
    launch(settings)


def _override(settings: Settings, model: str | None, flags: Mapping[str, Any]) -> None:
    """Raises BadRequest."""
    plain = [option for option in OPTIONS if option.key.setting not in _MADE]
    for option in plain:
        check_given(option.key.flag, option.key.setting, flags[option.name])
    check_given("--model", "model", model)
    settings.override(**{option.key.setting: flags[option.name] for option in plain if not option.is_model})
    of_model = {option.key.setting: flags[option.name] for option in plain if option.is_model}
    settings.override_model(model=model, **of_model)
    if flags["backend"] is not None:
        settings.override_model(backend=named_backend(flags["backend"]))
    settings.add_vllm_options(flags["vllm"] or ())
    if flags["api_key_file"]:
        settings.override(api_key_hashes=read_hashes(flags["api_key_file"], "--api-key-file"))
    if flags["lora_modules"]:
        settings.override_model(lora_modules=[lora_module(text) for text in flags["lora_modules"]])
    settings.add_models(flags["image_model"] or ())


def api_key() -> None:
    """Make an API key: the key for its user on the first line, its hash for --api-key-file on the second."""
    key = new_key()
    print(f"{key}\n{hash_key(key)}")


def pull(
    model: Annotated[
        str, typer.Argument(help=f"One of {', '.join(MODELS)}; or a folder or .gguf file of your own, to be listed.")
    ] = DEMO_MODEL,
) -> None:
    """Fetch a demo model into the user's cache, or check a model of one's own and list it by its name."""
    if model in MODELS:
        licence, terms = MODELS[model].licence, MODELS[model].terms
        told = f"use is subject to the terms of {terms}" if terms else f"its licence is {licence}"
        print(f"{model}: {told}", file=sys.stderr)
        print(fetch(model))
    else:
        name = import_module("kvloom.server.run.adopt").adopt(model)
        print(f"{name}: serve it with: kvloom serve {name}")
