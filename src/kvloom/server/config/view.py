"""The configuration as the server runs it, for people, without secrets and their paths."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from kvloom.contract.config import TierConfig
from kvloom.contract.sampling import advice_text
from kvloom.server.config.keys import LAYOUT_1, keys_of
from kvloom.server.config.settings import ServerConfig
from kvloom.server.serving.card import ModelCard

MASKED = "set"  # shown instead of a secret or of its path
_SECRET_TIER_OPTIONS = ("access_id", "access_key_file")


def config_view(config: ServerConfig) -> dict[str, Any]:
    """{"server": {name: value}, "models": [{name: value}]} of plain values, None = decided at start; and "keys": the
    name in config.json of each that has one.
    """
    server = _plain(
        config,
        "models",
        "pictures",
        "options",
        "log",
        "tls",
        "api_key_hashes",
        "management",
        "metrics",
        "response_limits",
    )
    server["management"] = ":".join(map(str, config.management)) if config.management else None
    server["metrics"] = ":".join(map(str, config.metrics)) if config.metrics else None
    server["tls"] = None if config.tls is None else f"mutual, {len(config.tls.ca_files)} CA files"
    if config.tls is not None:
        server["tls_cert"] = str(config.tls.cert)
        server["tls_key"] = MASKED
    if config.response_store is not None:
        server |= {f"response_store_{name}": value for name, value in _plain(config.response_limits).items()}
    server["api_keys"] = len(config.api_key_hashes)
    if "@" in config.otlp_endpoint:  # a password stands before it
        server["otlp_endpoint"] = MASKED
    server["log_level"], server["log_path"] = config.log.level, _value(config.log.path)
    models = [*map(_model, config.models), *map(_plain, config.pictures)]
    view: dict[str, Any] = {"server": {**server, **_plain(config.options)}, "models": models}
    shown = view["server"].keys() | {name for model in models for name in model}
    keys = {key.setting: path.rpartition(".")[2] for path, key in keys_of(LAYOUT_1) if key.setting in shown}
    return view | {"keys": keys}


def _model(card: ModelCard) -> dict[str, Any]:
    tier = card.engine.kv_tier
    engine = {
        name: value
        for name, value in _plain(card.engine, "kv_tier", "plugin_options").items()
        if not name.startswith("fake_")
    }
    engine["plugin_options"] = ", ".join(card.engine.plugin_options)  # a value may be a secret
    return {
        **_plain(card, "engine", "advice"),
        "advice": advice_text(card.advice),
        **engine,
        **({} if tier is None else _tier(tier)),
    }


def _tier(tier: TierConfig) -> dict[str, Any]:
    options = {name: MASKED if name in _SECRET_TIER_OPTIONS else value for name, value in tier.options.items()}
    plain = {"kv_pool": tier.factory, "kv_pool_timeout_s": tier.timeout_s, "kv_pool_verify": tier.is_watched}
    return plain | {f"kv_pool_{name}": value for name, value in options.items()}


def _plain(item: Any, *but: str) -> dict[str, Any]:
    return {field.name: _value(getattr(item, field.name)) for field in fields(item) if field.name not in but}


def _value(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {each}" for name, each in value.items())
    return (
        ", ".join(sorted(map(str, value)) if isinstance(value, frozenset) else map(str, value))
        if isinstance(value, tuple | frozenset)
        else value
    )
