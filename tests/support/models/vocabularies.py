"""Small tokenizers of every kind that models have. The fake model's letters (ids 97 to 122) are tokens of several
characters, of parts of a character and of added tokens, so that its answers are made of those.
"""

from collections.abc import Callable, Mapping
from functools import cache

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer

from kvloom.engine.text.chat_template import ChatTemplates
from kvloom.engine.text.encoding import byte_alphabet
from kvloom.engine.text.gguf_tokenizer import build_fast_tokenizer
from kvloom.engine.text.spelling import is_byte_level
from kvloom.engine.text.tokenizer import SpecialTokens, Tokenizer

TEMPLATE = (
    "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}<end>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
SPECIAL = ("<s>", "<end>", "<turn>")  # ids 0 to 2
_FIRST = 97  # of the letters that the fake model writes
_WORDS = ("yes", "no", "ab", "bc", "abc", "x", "tr", "ue", "ye")
_ALPHABET = byte_alphabet()
_BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_CONTROL = tuple(byte for byte in range(32) if chr(byte) not in "\t\n\r")


def _ordered(begin: tuple[str, ...], letters: tuple[str, ...], rest: tuple[str, ...]) -> list[str]:
    """Each token once: `begin`, then `letters` from the id of the fake model's first letter on, `rest` around them."""
    others = [text for text in dict.fromkeys(rest) if text not in (*begin, *letters)]
    num_before = _FIRST - len(begin)
    return [*begin, *others[:num_before], *letters, *others[num_before:]]


def _merges(tokens: list[str]) -> list[tuple[str, str]]:
    """Every way to make a token of two others."""
    known = set(tokens)
    cuts = ((text[:cut], text[cut:]) for text in sorted(tokens, key=len) for cut in range(1, len(text)))
    return [(left, right) for left, right in cuts if left in known and right in known]


def _byte_level(left_out: tuple[int, ...] = ()) -> FastTokenizer:
    """As in GGUF files; the last tokens are runs of spaces, as code models add them."""
    space = _ALPHABET[32]
    words = (*_WORDS, *(space + word for word in _WORDS), _ALPHABET[0xE2] + _ALPHABET[0x82], "\u00ac")
    runs = ("    ", "        ")
    letters = tuple(text for byte, text in _ALPHABET.items() if byte not in left_out)
    inner = (space + "y", "n" + "o", "a" + "b", "u" + "e")
    tokens = _ordered((*SPECIAL, "<unused>"), (*words, *runs), (*letters, *inner))
    types = [3 if i < 4 else 4 if text in runs else 1 for i, text in enumerate(tokens)]
    plain = [text for text, kind in zip(tokens, types, strict=True) if kind == 1]
    return build_fast_tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "qwen2",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.merges": [" ".join(pair) for pair in _merges(plain)],
        },
        "test",
    )


def _pieces() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """SentencePiece's tokens: those of the fake model's letters, and single characters."""
    words = (*_WORDS, *("▁" + word for word in _WORDS), "▁", "▁▁", '▁{"', "<0xE2>", "<0x82>", "<0xAC>", "é")
    return words, tuple('abcenorsuxytz{}":,. '.replace(" ", ""))


def _sentence_piece(has_prefix: bool) -> FastTokenizer:
    """As in GGUF files."""
    letters, single = _pieces()
    tokens = _ordered(("<unk>", *SPECIAL), letters, (*_BYTES, *single))
    types = [2, 3, 3, 3, *(6 if text in _BYTES else 1 for text in tokens[4:])]
    return build_fast_tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": [-float(i) for i in range(len(tokens))],
            "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_space_prefix": has_prefix,
        },
        "test",
    )


def _of_folder(extra: tuple[str, ...] = ()) -> FastTokenizer:
    """A SentencePiece vocabulary as folders hold it, without the steps around it."""
    letters, single = _pieces()
    tokens = _ordered(("<unk>", *SPECIAL), (*letters, *extra), (*_BYTES, *single))
    plain = [text for text in tokens if text not in (*_BYTES, *SPECIAL)]
    vocab = {text: i for i, text in enumerate(tokens)}
    fast = FastTokenizer(models.BPE(vocab, _merges(plain), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    fast.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", *SPECIAL)])
    fast.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return fast


def _metaspace() -> FastTokenizer:
    """As transformers makes the tokenizers of Llama 2 and Mistral."""
    fast = _of_folder()
    fast.pre_tokenizer = pre_tokenizers.Metaspace("▁", "first", split=False)
    strip = decoders.Strip(" ", 1, 0)
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return fast


def _gemma() -> FastTokenizer:
    """As Gemma's folders: no space before a text, and runs of spaces and newlines are added tokens."""
    runs = ("▁▁▁▁", "▁▁▁▁▁▁▁▁", "\n\n")
    fast = _of_folder(runs)
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.add_tokens([AddedToken(text, normalized=False) for text in runs])
    return fast


def _word_piece() -> FastTokenizer:
    """As BERT's: a token is the beginning of a word, or goes on with one."""
    single = tuple(chr(code) for code in range(33, 127))
    words = (*_WORDS, *("##" + word for word in _WORDS))
    tokens = _ordered(("[UNK]", *SPECIAL), words, (*single, *("##" + text for text in single), *_BYTES))
    fast = FastTokenizer(models.WordPiece({text: i for i, text in enumerate(tokens)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece(cleanup=False)
    fast.add_special_tokens([AddedToken(text, normalized=False) for text in ("[UNK]", *SPECIAL)])
    fast.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A", "<end>"], special_tokens=[("<s>", 1), ("<end>", 2)]
    )
    return fast


FAST: Mapping[str, Callable[[], FastTokenizer]] = {
    "byte-level": _byte_level,
    "byte-level without control bytes": lambda: _byte_level(_CONTROL),
    "SentencePiece with a space before": lambda: _sentence_piece(True),
    "SentencePiece": lambda: _sentence_piece(False),
    "Metaspace": _metaspace,
    "Gemma": _gemma,
    "WordPiece": _word_piece,
}
KINDS = tuple(FAST)


@cache
def fast(kind: str) -> FastTokenizer:
    return FAST[kind]()


@cache
def vocabulary(kind: str, has_end: bool = True) -> Tokenizer:
    """The tokenizer of this kind, with a chat template."""
    made = fast(kind)
    special = {i for i, token in made.get_added_tokens_decoder().items() if token.special}
    end, bos = made.token_to_id("<end>"), made.token_to_id("<s>")
    return Tokenizer(
        made,
        SpecialTokens(frozenset(special), frozenset({end} if has_end else ()), bos),
        is_byte_level=is_byte_level(made.decoder),
        templates=ChatTemplates({"default": TEMPLATE}, {"bos_token": "<s>", "eos_token": "<end>"}),
    )


def byte_letters() -> tuple[str, ...]:
    """The 256 letters of a byte-level vocabulary, in the order of the bytes."""
    return tuple(_ALPHABET[byte] for byte in range(256))
