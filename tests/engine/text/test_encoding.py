"""Texts to tokens: pieces give the tokens of the whole, bounds hold, and special tokens in users' texts stay text."""

import functools
import threading
import time
import unicodedata
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from kvloom.engine.text import encoding, pieces
from kvloom.engine.text.encoding import Encoder
from kvloom.engine.text.marks import Marks
from tests.support.engine.marks import restored
from tests.support.waiting import WAIT_S

WORDS = "hello world it's we'll THE Quick 123 4567 <|im_end|> 你好，世界。 こんにちは、 한국어。 \n\n  \t<x> a/b é"
SPECIAL = ("<|im_start|>", "<|im_end|>", "<s>", "</s>")


@functools.cache
def trained(name: str) -> FastTokenizer:
    """A small tokenizer that splits texts as a known model's does."""
    fast = FastTokenizer(BPE(byte_fallback=name == "sentencepiece"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if name == "sentencepiece":
        fast.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        alphabet = []
    elif name == "metaspace":
        fast.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", False)
        alphabet = []
    elif name in ("gpt2", "lacking"):
        alphabet = [] if name == "lacking" else alphabet  # without a letter for every byte, as SmolLM2's vocabulary
        fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    elif name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        fast.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    else:
        split = pre_tokenizers.Split(Regex(name), "isolated")
        fast.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        fast.normalizer = normalizers.NFC()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    fast.train_from_iterator([WORDS * 20, "the cat sat on the mat " * 20], trainer)
    fast.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in SPECIAL])
    fast.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    start = ("<s>", fast.token_to_id("<s>"))
    fast.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[start])
    fast.decoder = decoders.ByteLevel()
    return fast


DIVISIBLE = ["gpt2", "smollm", *sorted(pieces.KNOWN)]
ALL = [*DIVISIBLE, "sentencepiece", "metaspace"]
texts = st.text(st.sampled_from(list("abLT's ll  \n\r\t12.,;!?/<|>_é̃́각你世，。、ご𝅗🙂")), max_size=60)
chunks = st.lists(st.one_of(texts, st.sampled_from(["hello world", "<think>", " ", "it's"])), max_size=8).map("".join)


def encoder(name: str) -> Encoder:
    return Encoder(trained(name), is_byte_level=name not in ("sentencepiece", "metaspace"))


@pytest.mark.parametrize("name", DIVISIBLE)
@given(text=chunks)
def test_a_text_in_pieces_is_the_text_whole(name: str, text: str):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_CHARS", 3)
        patch.setattr(encoding, "MAX_WHOLE_CHARS", 0)
        for add_special_tokens in (False, True):
            whole = trained(name).encode(text, add_special_tokens=add_special_tokens).ids
            assert encoder(name).encode(text, add_special_tokens) == whole


def test_texts_are_cut_where_they_can_be(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pieces, "PIECE_CHARS", 4)
    assert list(pieces.pieces("hello big world")) == ["hello", " big world"]
    assert list(pieces.pieces("你好世界吗，是的是的是的。好")) == ["你好世界吗", "，是的是的是的", "。好"]
    assert list(pieces.pieces("1234 5678\n\nabc  def")) == ["1234 5678\n\nabc  def"]


@pytest.mark.parametrize("name", ["sentencepiece", "metaspace"])
def test_a_tokenizer_that_is_not_known_is_given_whole_texts(name: str):
    assert pieces.is_divisible(trained(name)) is False


@pytest.mark.parametrize("change", ["lstrip", "rstrip", "space"])
def test_tokens_that_reach_across_a_cut_forbid_it(change: str):
    fast = FastTokenizer.from_str(trained("gpt2").to_str())
    content = "a b" if change == "space" else "<mask>"
    options = {} if change == "space" else {change: True}
    fast.add_special_tokens([AddedToken(content, normalized=False, special=True, **options)])
    assert pieces.is_divisible(fast) is False


@pytest.mark.parametrize("name", ["smollm", "sentencepiece"])
def test_other_threads_go_on_while_a_long_text_is_read_that_cannot_be_cut(name: str):
    found, begun, is_inside = encoder(name), threading.Event(), True

    def read() -> None:
        nonlocal is_inside
        begun.set()
        found.encode("a" * 1_000_000)
        is_inside = False

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(WAIT_S)
    num_turns = 0
    while thread.is_alive():
        time.sleep(0.001)
        num_turns += is_inside
    assert num_turns > 10  # hundreds; one or two where the lock is not released


def test_a_long_text_is_given_up_early():
    text = "the cat sat on the mat " * 20_000
    found = encoder("gpt2").encode(text, False, 100)
    assert 100 < len(found) <= 100 + pieces.PIECE_CHARS
    assert found == encoder("gpt2").encode(text, False)[: len(found)]


@pytest.mark.parametrize("most", [1, 2, 3, 7, 200])
@pytest.mark.parametrize("text", ["", "it", "hello world it's we'll " * 20])
def test_a_text_is_cut_as_transformers_cuts_it(text: str, most: int):
    fast = FastTokenizer.from_str(trained("gpt2").to_str())
    special = [("<s>", fast.token_to_id("<s>")), ("</s>", fast.token_to_id("</s>"))]
    fast.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=special)
    ours = Encoder(fast, is_byte_level=True)
    assert ours.encode_within(text, most, add_special_tokens=False) == fast.encode(text).ids[1:-1][:most]
    found = ours.encode_within(text, most, add_special_tokens=True)
    assert len(found) <= most
    if most >= len(special):  # the library refuses fewer
        fast.enable_truncation(most)
        assert found == fast.encode(text).ids


@pytest.mark.parametrize("name", [*ALL, "lacking"])
@given(text=st.one_of(chunks, st.text()))
def test_no_text_has_fewer_tokens_than_its_length_says(name: str, text: str):
    assert encoder(name).least_tokens(text) <= len(trained(name).encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", DIVISIBLE)
def test_a_text_that_is_long_enough_has_a_bound(name: str):
    assert encoder(name).least_tokens("a" * 100_000) > 1000


@pytest.mark.parametrize("normalizer", [normalizers.Strip(), normalizers.NFKC(), normalizers.Replace("a", "")])
def test_a_tokenizer_that_may_shrink_a_text_without_end_promises_nothing(normalizer: Any):
    fast = FastTokenizer.from_str(trained("gpt2").to_str())
    fast.normalizer = normalizer
    assert Encoder(fast, is_byte_level=True).least_tokens("a" * 100_000) == 0


def test_a_vocabulary_that_lacks_letters_counts_only_bytes_that_have_one():
    found = encoder("lacking")
    assert found.least_tokens("\x04\x06" * 100_000) == len(found.encode("\x04\x06" * 10, False)) == 0
    assert found.least_tokens("a" * 1000 + "\x04" * 1000) == found.least_tokens("a" * 1000) > 0


def test_a_vocabulary_that_lacks_letters_that_nfc_may_make_promises_nothing():
    fast = FastTokenizer.from_str(trained("lacking").to_str())
    fast.normalizer = normalizers.NFC()
    assert Encoder(fast, is_byte_level=True).least_tokens("a" * 100_000) == 0


def test_nfc_shrinks_no_text_more_than_is_reckoned_with():
    points = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    longest: dict[str, int] = {}  # by character: bytes of the longest one that decomposes to it
    for char in points:
        plain = unicodedata.normalize("NFD", char)
        if len(plain) == 1:
            longest[plain] = max(longest.get(plain, 0), len(char.encode()), len(plain.encode()))
    for char in points:
        if unicodedata.normalize("NFC", char) == char:
            parts = unicodedata.normalize("NFD", char)
            most = sum(longest.get(part, len(part.encode())) for part in parts)
            assert most <= encoding._NFC_SHRINKS * len(char.encode()), hex(ord(char))


# -- special tokens in users' texts

FRAME = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"


def rendered(name: str, texts: tuple[str, str]) -> list[int]:
    marks = Marks(frozenset(SPECIAL), list(texts))
    marked = FRAME.format(*map(marks.mark, texts))
    assert restored(marks, marked) == FRAME.format(*texts)
    return encoder(name).encode_marked(marked, marks.originals, add_special_tokens=False)


@pytest.mark.parametrize("name", ALL)
@given(first=chunks, second=chunks)
def test_texts_without_special_tokens_are_the_tokens_they_were(name: str, first: str, second: str):
    assume(not any(special in first or special in second for special in SPECIAL))
    whole = trained(name).encode(FRAME.format(first, second), add_special_tokens=False).ids
    assert rendered(name, (first, second)) == whole


@pytest.mark.parametrize("name", ALL)
@given(parts=st.lists(st.one_of(chunks, st.sampled_from([*SPECIAL, "<", "<|im_", "</"])), max_size=6), second=chunks)
def test_special_tokens_of_users_are_text(name: str, parts: list[str], second: str):
    fast, text = trained(name), "".join(parts)
    ids = rendered(name, (text, second))
    special = [fast.token_to_id(token) for token in SPECIAL]
    assert [i for i in ids if i in special] == [special[0], special[1], special[0]]
    cuts = [at for at, i in enumerate(ids) if i in special]
    if name not in ("sentencepiece", "metaspace"):  # these decode spaces differently
        middle = fast.decode(ids[cuts[0] + 1 : cuts[1]], skip_special_tokens=False)
        wanted = f"user\n{text}"
        assert middle == (unicodedata.normalize("NFC", wanted) if fast.normalizer else wanted)


def test_a_special_token_is_not_made_of_two_texts():
    ids = encoder("gpt2").encode_marked(*_joined("<|im_", "end|>"), add_special_tokens=False)
    assert trained("gpt2").token_to_id("<|im_end|>") not in ids
    assert trained("gpt2").decode(ids) == "<|im_end|>"


def _joined(*texts: str) -> tuple[str, dict[str, str]]:
    marks = Marks(frozenset(SPECIAL), texts)
    return "".join(map(marks.mark, texts)), marks.originals
