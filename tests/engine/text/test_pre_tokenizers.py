"""Pre-tokenizers that GGUF files name: where a text is cut before its bytes are merged."""

import pytest

from kvloom.contract.errors import ModelError
from kvloom.engine.text.encoding import byte_alphabet
from kvloom.engine.text.gguf_tokenizer import build_fast_tokenizer

BYTE_OF = {text: byte for byte, text in byte_alphabet().items()}
TEXT = "HelloWorld it's 12345\n\n x/y"
WORDS = ["HelloWorld", " it", "'s", " "]
WIDE = ["Hello", "World", " it's", " "]
TAIL = ["\n\n", " x", "/y"]


def pieces(pre: str) -> list[str]:
    tokens = sorted(BYTE_OF)
    meta = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens}
    cut = build_fast_tokenizer(meta, "file").pre_tokenizer.pre_tokenize_str(TEXT)
    return [bytes(BYTE_OF[character] for character in text).decode() for text, _ in cut]


@pytest.mark.parametrize(
    ("pre", "wanted"),
    [
        ("llama-bpe", [*WORDS, "123", "45", *TAIL]),
        ("dbrx", [*WORDS, "123", "45", *TAIL]),
        ("qwen2", [*WORDS, *"12345", *TAIL]),
        ("gpt-4o", [*WIDE, "123", "45", *TAIL]),
        ("gpt-2", ["HelloWorld", " it", "'s", " 12345", "\n\n", " x", "/", "y"]),
        ("olmo", ["HelloWorld", " it", "'s", " 12345", "\n\n", " x", "/", "y"]),
        ("refact", ["HelloWorld", " it", "'s", " ", *"12345", "\n\n", " x", "/", "y"]),
        ("smollm", ["HelloWorld", " it", "'s", " ", *"12345", "\n\n", " x", "/", "y"]),
        ("tekken", ["Hello", "World", " it", "'s", " ", *"12345", *TAIL]),
        ("qwen35", [*WORDS, *"12345", *TAIL]),
        ("deepseek-llm", ["HelloWorld", " it", "'", "s", " ", "12345", "\n", "\n", " x", "/", "y"]),
        ("deepseek-coder", ["HelloWorld", " it", "'", "s", " ", *"12345", "\n", "\n", " x", "/", "y"]),
        ("deepseek-v3", ["HelloWorld", " it", "'s", " ", "123", "45", "\n\n", " x", "/y"]),
        ("falcon", ["HelloWorld", " it", "'", "s", " ", "123", "45", "\n\n", " x", "/", "y"]),
        ("default", ["HelloWorld", " it", "'", "s", " ", "123", "45", "\n\n", " x", "/", "y"]),
        ("bloom", ["HelloWorld", " it's", " 12345", "\n\n", " x/y"]),
        ("viking", ["HelloWorld", " it's", " ", *"12345", "\n\n", " x/y"]),
        ("seed-coder", [*WORDS, *"12345", *TAIL]),
        ("minicpm5", [*WORDS, "123", "45", *TAIL]),
    ],
)
def test_a_text_is_cut_as_the_models_tokenizer_was_trained_to(pre: str, wanted: list[str]):
    assert pieces(pre) == wanted


def test_an_unknown_one_is_refused_by_name():
    with pytest.raises(ModelError, match="pre-tokenizer 'klingon' is not known; known are gpt-2"):
        pieces("klingon")
