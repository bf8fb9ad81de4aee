"""The vocabularies that llama.cpp tests itself with: our ids are those that it has written down.

KVLOOM_LLAMA_CPP names the folder of llama.cpp's source, which holds models/ggml-vocab-*.gguf; without it these tests
are skipped.
"""

import os
from pathlib import Path

import pytest

from kvloom.engine.text.tokenizer import load_tokenizer

SOURCE = Path(os.environ.get("KVLOOM_LLAMA_CPP", "/nowhere"))
VOCABULARIES = sorted((SOURCE / "models").glob("ggml-vocab-*.gguf"))

pytestmark = pytest.mark.skipif(not VOCABULARIES, reason="KVLOOM_LLAMA_CPP names no folder of llama.cpp's source")


def name_of(path: Path) -> str:
    return path.stem.removeprefix("ggml-vocab-")


@pytest.mark.parametrize("path", VOCABULARIES, ids=name_of)
def test_texts_have_the_ids_that_are_written_down(path: Path):
    tokenizer = load_tokenizer(path)
    texts, ids = path.with_name(path.name + ".inp"), path.with_name(path.name + ".out")
    if not texts.exists():
        assert tokenizer.decode(tokenizer.encode("Hello world", add_special_tokens=False)) == "Hello world"
        return
    pairs = zip(texts.read_bytes().decode().split("\n__ggml_vocab_test__\n"), ids.read_text().split("\n"), strict=False)
    wrong = {
        text: (found, wanted)
        for text, line in pairs
        if (found := tokenizer.encode(text, add_special_tokens=False)) != (wanted := [int(id) for id in line.split()])
    }
    assert not wrong
