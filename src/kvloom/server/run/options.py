"""The options of `kvloom serve`: a row each, that of the key of config.json which they override where there is one."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from kvloom.server.config.key import PATH, Key
from kvloom.server.config.keys import LAYOUT_2, keys_of

_OWN = (  # without a key in config.json
    Key(
        list, "a text-to-image model beside MODEL, NAME=FOLDER; may be repeated", items=str, setting="image_model",
        flag="--image-model",
    ),
    Key(str, "a config.json; the other options override it", longest=PATH, setting="config", flag="--config"),
    Key(
        str, "", setting="dtype", flag="--dtype", help="auto, float32 or bfloat16; with vllm what that takes."
    ),
    Key(list, "any argument of vLLM, KEY=VALUE; may be repeated", items=str, setting="vllm", flag="--vllm"),
    Key(str, "write the process number here while serving", longest=PATH, setting="pid_file", flag="--pid-file"),
    Key(float, "seconds that running requests get when told to stop", setting="grace_s", flag="--grace"),
)  # fmt: skip
# in the order of --help; others come after them
_ORDER = (
    "--host", "--port", "--image-model", "--served-model-name", "--config", "--backend", "--device", "--dtype",
    "--tensor-parallel-size", "--pipeline-parallel-size", "--distributed-executor-backend", "--quantization",
    "--max-model-len", "--vllm", "--weight-format", "--weight-cache", "--kv-dtype", "--snapshot-share", "--speculate",
    "--draft-model", "--run-ahead", "--max-seq-len", "--max-batch", "--max-gap-ms", "--stream-interval",
    "--api-key-file", "--parse-special-tokens", "--generation-config", "--lora-modules", "--lora-root",
    "--response-store", "--allowed-host", "--allowed-image-host", "--allow-all-addresses", "--log-level", "--pid-file",
    "--crash-patience", "--grace",
)  # fmt: skip
_OF_ITS_MODEL = ("dtype", "num_speculative_tokens")  # besides those of ModelConfig


def sentence(key: Key) -> str:
    """Its meaning as one."""
    first = key.meaning.split(" ", 1)[0]  # of a value, or a name, if it ends with a colon
    return f"{key.meaning if first.endswith(':') else key.meaning[0].upper() + key.meaning[1:]}."


@dataclass(frozen=True, slots=True)
class Option:
    key: Key
    is_model: bool  # whether it sets the only model's setting, not the server's

    @property
    def name(self) -> str:
        """As a parameter of Python."""
        return self.key.flag.removeprefix("--").replace("-", "_")

    @property
    def type(self) -> Any:
        if list in self.key.types:
            return list[str]
        if float in self.key.types:
            return float
        return Path if self.key.longest == PATH else self.key.types[0]

    @property
    def help(self) -> str:
        """A sentence, for people."""
        *others, last = self.key.choices or ("",)
        return self.key.help.format(choices=f"{', '.join(others)} or {last}") or sentence(self.key)


def _options() -> Iterable[Option]:
    for path, key in keys_of(LAYOUT_2):
        if key.flag:
            yield Option(key, "[]" in path or key.setting in _OF_ITS_MODEL)
    for key in _OWN:
        yield Option(key, key.setting in _OF_ITS_MODEL)


_PLACES = {flag: place for place, flag in enumerate(_ORDER)}
OPTIONS = tuple(sorted(_options(), key=lambda option: _PLACES.get(option.key.flag, len(_PLACES))))


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives the command, which takes a model and any options, those of OPTIONS for Typer."""
    own = [each for each in Signature.from_callable(command).parameters.values() if each.kind is not each.VAR_KEYWORD]
    added = [
        Parameter(
            option.name,
            Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[option.type | None, typer.Option(help=option.help)],
        )
        for option in OPTIONS
    ]
    cast(Any, command).__signature__ = Signature([*own, *added], return_annotation=None)
    return command
