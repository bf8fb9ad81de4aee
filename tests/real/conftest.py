"""The real small model, opened once for all tests that leave it as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvloom.engine.text.tokenizer import Tokenizer, load_tokenizer
from tests.real.model import RealModel, open_real
from tests.support.lazily import lazily

if TYPE_CHECKING:
    from tests.real.oracle import Oracle

oracles = lazily("tests.real.oracle")


@pytest.fixture(scope="session")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="session")
def oracle(smollm2_path: Path) -> Oracle:
    """The oracle, in float32. A test that changes weights changes a copy."""
    return oracles.Oracle(smollm2_path, functools.cache(functools.partial(oracles.load_oracle, smollm2_path)))


@pytest.fixture(scope="session")
def real(smollm2_path: Path, tokenizer: Tokenizer) -> Callable[[str], RealModel]:
    """Opens the model of a kind, see `open_real`; once for each kind."""
    return functools.cache(functools.partial(open_real, smollm2_path, tokenizer))
