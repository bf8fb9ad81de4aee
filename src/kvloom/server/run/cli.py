"""`kvloom serve | pull | api-key`. Options and wiring, no logic."""

import os
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from kvloom.checkpoints.demo_models import MODELS
from kvloom.server.config.backends import named_backend
from kvloom.server.config.given import check_given
from kvloom.server.config.plugin_options import SETTINGS
from kvloom.server.config.settings import Settings, lora_module
from kvloom.server.run.launch import DEMO_MODEL, fetch, launch, read_settings
from kvloom.server.secure.api_keys import hash_key, new_key, read_hashes


def serve(
    model: Annotated[str | None, typer.Argument(help="A folder, a .gguf file, or the name of a fetched model.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    image_model: Annotated[
        list[str] | None, typer.Option(help="A text-to-image model beside MODEL, NAME=FOLDER; may be repeated.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="The name that requests use.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json; the other options override it.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="auto, cpu, torch, mock (no weights), or an engine that is installed.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or npu.")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32 or bfloat16; with vllm what that takes.")] = None,
    tensor_parallel_size: Annotated[int | None, typer.Option(help="vLLM: devices that share each layer.")] = None,
    pipeline_parallel_size: Annotated[int | None, typer.Option(help="vLLM: stages of some layers each.")] = None,
    distributed_executor_backend: Annotated[
        str | None, typer.Option(help="vLLM: mp, ray, uni: starts workers.")
    ] = None,
    quantization: Annotated[str | None, typer.Option(help="vLLM: how the weights are quantised.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="vLLM: longest prompt and answer together.")] = None,
    vllm: Annotated[list[str] | None, typer.Option(help="Any argument of vLLM, KEY=VALUE; may be repeated.")] = None,
    weight_format: Annotated[str | None, typer.Option(help="auto, stored, w8a8, w4a8 or bf16.")] = None,
    weight_cache: Annotated[str | None, typer.Option(help="Folder that packed weights are kept in, or off.")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Of keys and values: auto, bf16 or int8.")] = None,
    speculate: Annotated[int | None, typer.Option(help="Tokens guessed ahead by prompt lookup; 0 is off.")] = None,
    run_ahead: Annotated[bool | None, typer.Option(help="Send the step after one that decodes while it runs.")] = None,
    max_seq_len: Annotated[int | None, typer.Option(help="Longest prompt and answer together, in tokens.")] = None,
    max_batch: Annotated[int | None, typer.Option(help="Most requests computed in one step.")] = None,
    max_gap_ms: Annotated[
        float | None, typer.Option(help="Longest step while somebody streams; 0: throughput first, -1: 3 decode steps.")
    ] = None,
    stream_interval: Annotated[int | None, typer.Option(help="Tokens sent together, after a stream's first.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="Hashes of API keys, one a line (kvloom api-key).")] = None,
    parse_special_tokens: Annotated[
        bool | None, typer.Option(help="Take special tokens in the text of messages for such.")
    ] = None,
    generation_config: Annotated[
        str | None, typer.Option(help="auto: sample as the model's files advise where requests do not say; or none.")
    ] = None,
    lora_modules: Annotated[list[str] | None, typer.Option(help="LoRA adapter, NAME=PATH; may be repeated.")] = None,
    lora_root: Annotated[Path | None, typer.Option(help="Adapters below it may be loaded at run time.")] = None,
    response_store: Annotated[Path | None, typer.Option(help="Keep responses of /v1/responses in this file.")] = None,
    allowed_host: Annotated[list[str] | None, typer.Option(help="Name to be asked under; may be repeated.")] = None,
    allowed_image_host: Annotated[
        list[str] | None, typer.Option(help="Server that images are fetched from; may be repeated.")
    ] = None,
    allow_all_addresses: Annotated[bool | None, typer.Option(help="Let --host be 0.0.0.0 or ::.")] = None,
    log_level: Annotated[str | None, typer.Option(help="Verbose, Info, Warning, Error or None.")] = None,
    pid_file: Annotated[Path | None, typer.Option(help="Write the process number here while serving.")] = None,
    crash_patience: Annotated[
        float | None, typer.Option(help="Seconds that requests wait for a model that died; 0: they end.")
    ] = None,
    grace: Annotated[float | None, typer.Option(help="Seconds that running requests get when told to stop.")] = None,
) -> None:
    """Serve models over HTTP. Without MODEL, the demo model is fetched and served."""
    flags = dict(locals())
    settings = read_settings(config, os.environ)
    _override(settings, flags)
    launch(settings)


# flags -> settings (the same name, or the one given here): of the server, and of its only model
_SERVER = {
    **{
        name: name
        for name in (
            "host",
            "port",
            "max_seq_len",
            "max_batch",
            "max_gap_ms",
            "stream_interval",
            "log_level",
            "pid_file",
        )
    },
    **{name: name for name in ("run_ahead", "lora_root", "response_store")},
    "grace": "grace_s",
    "allow_all_addresses": "allows_all_addresses",
    "crash_patience": "crash_patience_s",
    "allowed_host": "allowed_hosts",
    "allowed_image_host": "image_hosts",
}
_MODEL = {
    **{name: name for name in ("model", "device", "dtype", "weight_format", "weight_cache", "kv_dtype", *SETTINGS)},
    "generation_config": "generation_config",
    "served_model_name": "name",
    "speculate": "num_speculative_tokens",
    "parse_special_tokens": "parses_special_text",
}


def _override(settings: Settings, flags: Mapping[str, Any]) -> None:
    """Raises BadRequest."""
    for name, setting in {**_SERVER, **_MODEL}.items():
        check_given(f"--{name.replace('_', '-')}", setting, flags[name])
    settings.override(**{setting: flags[name] for name, setting in _SERVER.items()})
    settings.override_model(**{setting: flags[name] for name, setting in _MODEL.items()})
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
