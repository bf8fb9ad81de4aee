"""Detokenizer: whole characters only, and nothing lost."""

from hypothesis import given
from hypothesis import strategies as st

from kvloom.engine.text.detok import Detokenizer, text_bytes
from kvloom.rank.fake import EOS_ID, ByteTokenizer

ENDINGS = [b"\x80", b"\xbf", b"\x80\x80", b"\xbf\x80", b"\x80\x80\x80", b"\xbf\x80\x80"]  # ends of some characters


def test_a_character_comes_out_when_its_last_byte_has_come():
    detok = Detokenizer(lambda i: bytes([i]))
    assert [detok.add(byte) for byte in "é🧵".encode()] == ["", "é", "", "", "", "🧵"]


def test_half_a_character_is_not_given_out_unless_it_can_become_none():
    detok = Detokenizer(lambda i: bytes([i]))
    assert [detok.add(byte) for byte in "🧵".encode()[:3]] == ["", "", ""]
    assert detok.add(ord("a")) == "\ufffda"


@given(st.lists(st.binary(max_size=5), max_size=20))
def test_joined_texts_equal_the_bytes_decoded_at_once_but_for_what_is_cut_at_the_end(pieces):
    detok = Detokenizer(lambda i: pieces[i])
    text = "".join(detok.add(i) for i in range(len(pieces)))
    data = b"".join(pieces)
    rest = next(n for n in range(4) if text == data[: len(data) - n].decode("utf-8", errors="replace"))
    assert not rest or any((data[-rest:] + more).decode("utf-8", errors="ignore") for more in ENDINGS)


def test_special_tokens_have_text_only_where_they_are_not_skipped():
    vocabulary = ByteTokenizer()
    assert text_bytes(vocabulary, skips_special=True)(EOS_ID) == b""
    assert text_bytes(vocabulary, skips_special=False)(EOS_ID) == b"<eos>"
    assert text_bytes(vocabulary, skips_special=True)(97) == b"a"
