"""Text of tokens: whatever the tokenizer, tokens one by one give the text of all of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from kvloom.engine.text.detok import Detokenizer, text_bytes
from kvloom.engine.text.spelling import Spelling
from tests.support.models.vocabularies import KINDS, byte_letters, fast, vocabulary

TEXTS = (
    "",
    "yes no",
    " yes",
    "  two  spaces ",
    "if x:\n    return abc\n        no",
    "\n\n",
    "a<end>b",
    "é € 🧵",
    "▁",
    '{"a": "yes"}',
)


def of_any(kind: str, ids: list[int]) -> list[int]:
    return [i % vocabulary(kind).vocab_size for i in ids]


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.integers(0, 1023), max_size=12), st.data())
def test_any_cut_of_any_tokens_is_the_text_of_all(kind: str, ids: list[int], data: st.DataObject):
    tokenizer, ids = vocabulary(kind), of_any(kind, ids)
    cut = data.draw(st.integers(0, len(ids)))
    detok = Detokenizer(text_bytes(tokenizer, skips_special=False))
    parts = ["".join(detok.add(i) for i in some) for some in (ids[:cut], ids[cut:])]
    whole = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", errors="replace")
    assert whole.startswith("".join(parts)), "half a character at the end is held back"
    assert whole[len("".join(parts)) :] in ("", "\ufffd")


@pytest.mark.parametrize("kind", KINDS)
@given(st.lists(st.integers(0, 1023), max_size=12))
def test_it_is_the_text_of_the_library_behind_other_tokens_and_alone(kind: str, ids: list[int]):
    tokenizer, library, ids = vocabulary(kind), fast(kind), of_any(kind, ids)
    first = library.token_to_id("x")
    behind = b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", errors="replace")
    if "\ufffd" in behind:
        return  # the library shows each byte of an invalid character
    assert "x" + behind == library.decode([first, *ids], skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == library.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids) == library.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_text_of_a_prompt_is_the_text_that_was_encoded(kind: str, text: str):
    tokenizer = vocabulary(kind)
    ids = tokenizer.encode(text)
    found = b"".join(tokenizer.prompt_bytes(ids)).decode()
    assert len(tokenizer.prompt_bytes(ids)) == len(ids)
    if kind == "WordPiece":  # keeps words only
        assert found == tokenizer.decode(ids[1:-1], skip_special_tokens=False)
    elif kind == "SentencePiece with a space before":  # also behind a special token
        assert found == as_spelt(kind, text).replace("<end>", "<end> ")
    elif kind == "Metaspace":  # adds no space to one that is there
        assert found == as_spelt(kind, text).removeprefix(" ")
    else:
        assert found == as_spelt(kind, text)


def as_spelt(kind: str, text: str) -> str:
    """The text as the vocabulary can tell it: U+2581 is a space to SentencePiece."""
    return text if "byte" in kind else text.replace("▁", " ")


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "WordPiece"])
@given(st.text(alphabet=' abenosyx{}"\n<>é€▁', max_size=20))
def test_a_piece_of_a_text_is_encoded_as_it_stands(kind: str, text: str):
    tokenizer = vocabulary(kind)
    ids = tokenizer.encode_inside(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == as_spelt(kind, text)
    assert tokenizer.encode("<end>ab", add_special_tokens=False) == tokenizer.encode("<end>ab", False), "is as before"


@pytest.mark.parametrize("kind", KINDS)
def test_a_piece_may_be_read_with_or_without_special_tokens(kind: str):
    tokenizer = vocabulary(kind)
    (end,) = tokenizer.eos_ids
    assert end not in tokenizer.encode_inside("ab<end>")
    assert tokenizer.encode_inside("ab<end>", is_plain=False)[-1] == end
    assert tokenizer.encode("ab<end>", add_special_tokens=False).count(end) == 1


def test_runs_of_spaces_that_are_added_tokens_are_spaces():
    tokenizer = vocabulary("Gemma")
    ids = tokenizer.encode("x:\n\n        no", add_special_tokens=False)
    assert "▁▁▁▁▁▁▁▁" in [tokenizer.token_text(i) for i in ids]
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"x:\n\n        no"


def test_an_added_token_is_spelt_as_texts_have_it():
    """Not in the byte alphabet, though its letters are some of it."""
    library = FastTokenizer(BPE({letter: i for i, letter in enumerate(byte_letters())}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_tokens([AddedToken(text, normalized=False) for text in ("ñ", "ño ", "Ġx")])
    spelling = Spelling(library, is_byte_level=True)
    found = {text: spelling.bytes_of(library.token_to_id(text)) for text in ("ñ", "ño ", "Ġx")}
    assert found == {"ñ": "ñ".encode(), "ño ": "ño ".encode(), "Ġx": b" x"}
