"""Finds what would make a start fail, without starting: addresses, certificates, models, memory."""

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from kvloom.contract.config import BACKENDS, EngineConfig
from kvloom.contract.errors import ModelError, UserError
from kvloom.net.listening import listen
from kvloom.server.config.backends import factory_of
from kvloom.server.config.settings import ServerConfig, Settings
from kvloom.server.run.launch import resolve_model
from kvloom.server.run.loading import beside
from kvloom.server.run.main import check_addresses
from kvloom.server.run.names import check_names
from kvloom.server.secure.tls import tls_context

_CHECK_S = 120.0  # reading the headers of a model's files


def problems(settings: Settings) -> Iterator[UserError]:
    """Everything that would make a start with these settings fail. Replaces the models' names by paths."""
    is_there = []
    for model in settings.models:
        missing = list(_found(partial(resolve_model, model, may_fetch=False)))
        is_there.append(not missing)
        yield from missing
    try:
        config = settings.build()
    except UserError as error:
        yield error
        return
    yield from _found(partial(check_addresses, config))
    yield from _found(partial(check_names, config))
    for key, address in config.addresses.items():
        yield from _found(partial(_check_port, key, *address))
    yield from _found(partial(_check_tls, config))
    are_language = [not model.get("makes_pictures") for model in settings.models]
    cards, promised = list(itertools.compress(config.models, itertools.compress(is_there, are_language))), 0
    for index, card in enumerate(cards):
        later = [each.engine for each in cards[index + 1 :]]
        try:
            promised += _check_model(card.name, beside(card.engine, promised, later))
        except UserError as error:
            yield error


def _found(check: Callable[[], object]) -> Iterator[UserError]:
    try:
        check()
    except UserError as error:
        yield error


def _check_port(key: str, host: str, port: int) -> None:
    listen(host, port, option="" if key == "port" else key).close()


def _check_tls(config: ServerConfig) -> None:
    if config.tls is not None:
        tls_context(config.tls)


def _check_model(name: str, config: EngineConfig) -> int:
    """Check a model in a process of its own, as a rank reads it; a plug-in's by its own check. Returns the bytes of
    this machine's memory that it will take, as far as that is known. Raises ServingError.
    """
    if config.backend == "fake":
        return 0
    if config.backend not in BACKENDS:
        check = getattr(factory_of(config.backend), "check", None)
        if check is not None:
            check(config)
        return 0
    done = subprocess.run(
        [sys.executable, "-m", "kvloom.rank.check"],
        input=msgspec.json.encode(config),
        capture_output=True,
        timeout=_CHECK_S,
        check=False,
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ModelError(f"{name}: {lines[-1] if lines else f'the check ended with {done.returncode}'}")
    return int(done.stdout)
