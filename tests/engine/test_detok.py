"""Detokenizer: whole characters only, and nothing lost."""

from hypothesis import given
from hypothesis import strategies as st

from kvloom.engine.detok import Detokenizer, text_bytes
from kvloom.engine.fake import EOS_ID, ByteTokenizer


def test_a_character_comes_out_when_its_last_byte_has_come():
    detok = Detokenizer(lambda i: bytes([i]))
    assert [detok.add(byte) for byte in "é🧵".encode()] == ["", "é", "", "", "", "🧵"]
    assert detok.finish() == ""


def test_half_a_character_at_the_end_becomes_one_replacement_character():
    detok = Detokenizer(lambda i: bytes([i]))
    assert [detok.add(byte) for byte in "🧵".encode()[:3]] == ["", "", ""]
    assert detok.finish() == "\ufffd"


@given(st.lists(st.binary(max_size=5), max_size=20))
def test_joined_texts_equal_the_bytes_decoded_at_once(pieces):
    detok = Detokenizer(lambda i: pieces[i])
    text = "".join(detok.add(i) for i in range(len(pieces))) + detok.finish()
    assert text == b"".join(pieces).decode("utf-8", errors="replace")


def test_special_tokens_have_text_only_where_they_are_not_skipped():
    vocabulary = ByteTokenizer()
    assert text_bytes(vocabulary, skips_special=True)(EOS_ID) == b""
    assert text_bytes(vocabulary, skips_special=False)(EOS_ID) == b"<eos>"
    assert text_bytes(vocabulary, skips_special=True)(97) == b"a"
