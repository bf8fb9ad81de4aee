"""Parses vLLM's arguments with vLLM's own parser."""

import difflib
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NoReturn

from kvloom.contract.errors import BadRequest


def parse(arguments: Sequence[str]) -> Any:
    """AsyncEngineArgs of the installed vLLM. Raises BadRequest that names an unknown option or wrong value."""
    made = import_module("vllm.engine.arg_utils").AsyncEngineArgs
    parser = made.add_cli_args(_parser(import_module("vllm.utils.argparse_utils").FlexibleArgumentParser))
    try:
        known, unknown = parser.parse_known_args(list(arguments))
    except _Refused as error:
        raise BadRequest("vllm", str(error)) from None
    if unknown:
        name = unknown[0].partition("=")[0]
        names = [option for action in parser._actions for option in action.option_strings]
        near = difflib.get_close_matches(name, names, 1)
        version = import_module("vllm").__version__
        meant = f"; {_spelt(near[0])} is one" if near else ""
        raise BadRequest(f"vllm.{_spelt(name)}", f"is no argument of vLLM {version}{meant}")
    return made.from_cli_args(known)


class _Refused(Exception):
    """The parser's error, raised instead of ending the process."""


def _parser(kind: Any) -> Any:
    class Parser(kind):  # type: ignore[misc]
        def error(self, message: str) -> NoReturn:
            raise _Refused(" ".join(message.split()))

    return Parser(add_help=False, allow_abbrev=False)


def _spelt(option: str) -> str:
    return option.lstrip("-").replace("-", "_")
