"""Whether a draft model has the vocabulary of the model that it guesses for."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import ModelError
from kvloom.engine.text.same_tokens import check_same_tokens
from kvloom.engine.text.tokenizer import load_tokenizer
from kvloom.rank.byte_tokenizer import ByteTokenizer
from kvloom.rank.opening import check_draft_model


def tokenizer(words: Mapping[int, str], added: Mapping[int, str] | None = None) -> Any:
    """A vocabulary of `words`, and of `added` tokens."""
    texts = {**words, **(added or {})}
    return SimpleNamespace(
        vocab_size=max(texts) + 1,
        token_text=lambda id: texts.get(id, ""),
        is_added=lambda id: id in (added or {}),
    )


WORDS = {0: "a", 1: "b", 2: "c"}


def test_vocabularies_may_differ_in_added_tokens_and_in_length():
    own = tokenizer(WORDS, {3: "<end>"})
    for other in (
        own,
        tokenizer(WORDS),
        tokenizer(WORDS, {3: "<stop>", 9: "<pad>"}),
        tokenizer({**WORDS, 3: "[PAD3]"}),
    ):
        check_same_tokens(own, other, "small")
        check_same_tokens(other, own, "small")
    check_same_tokens(own, tokenizer({0: "a", 2: "c"}), "small")  # an id that nobody uses


def test_the_first_token_that_differs_is_named():
    with pytest.raises(
        ModelError, match="draft_model: small has another vocabulary: token 1 is 'x' there and 'b' here"
    ):
        check_same_tokens(tokenizer(WORDS), tokenizer({0: "a", 1: "x", 2: "y"}), "small")


def test_a_model_without_a_draft_model_reads_no_vocabulary_for_it():
    def vocabulary() -> ByteTokenizer:
        raise AssertionError("nothing is compared")

    check_draft_model(EngineConfig(model="m"), vocabulary)


def test_an_added_token_is_known_as_such(smollm2_path):
    found = load_tokenizer(smollm2_path)
    assert found.is_added(0)
    assert not found.is_added(1000)
    check_draft_model(EngineConfig(model="m", draft_model=str(smollm2_path)), lambda: found)


def test_the_vocabulary_of_an_assistant_is_compared_by_its_size_alone(tmp_path: Path):
    """Its files need no tokenizer."""
    config = {"architectures": ["Gemma4AssistantForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "model.safetensors").touch()

    def vocabulary() -> ByteTokenizer:
        raise AssertionError("nothing is compared")

    check_draft_model(EngineConfig(model="m", draft_model=str(tmp_path)), vocabulary)
