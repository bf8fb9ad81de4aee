"""The tokenizers of encoders inside a GGUF file: word pieces (`bert`), and pieces chosen by their scores (`t5`)."""

from collections.abc import Mapping
from typing import Any

from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import Unigram, WordPiece

from kvloom.contract.errors import ModelError
from kvloom.engine.text.gguf_ends import named_id

_BYTE = 6  # token type of GGUF
_MARK = "▁"
_BOS, _CLS = "tokenizer.ggml.bos_token_id", "tokenizer.ggml.cls_token_id"
_LONGEST_WORD = 100  # letters, of BERT's own tokenizer: a longer word is unknown


def word_pieces(meta: Mapping[str, Any], tokens: list[str], file: str) -> FastTokenizer:
    """Files mark where words begin, not where they go on. Older files do not say whether letters are lowered:
    they are where no piece has a capital letter. Raises ModelError.
    """
    vocab = {_piece(text): i for i, text in enumerate(tokens)}
    first = "bos" if _BOS in meta and _CLS not in meta else "cls"  # as newer converters call it
    cls, sep, unknown = (_named(meta, tokens, name, file) for name in (first, "seperator", "unknown"))
    fast = FastTokenizer(WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=_LONGEST_WORD))
    has_capitals = any(text != text.lower() for text in tokens if text.startswith(_MARK))
    lowers, strips = (meta.get(f"tokenizer.ggml.normalizer.{name}") for name in ("lowercase", "strip_accents"))
    fast.normalizer = normalizers.BertNormalizer(
        lowercase=not has_capitals if lowers is None else lowers is True,
        strip_accents=None if strips is None else strips is True,
    )
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    ends = [(cls, vocab[cls]), (sep, vocab[sep])]
    fast.post_processor = processors.TemplateProcessing(
        single=[cls, "$A", sep], pair=[cls, "$A", sep, "$B:1", f"{sep}:1"], special_tokens=ends
    )
    return fast


def scored_pieces(meta: Mapping[str, Any], tokens: list[str], file: str) -> FastTokenizer:
    """Of all ways to cut a text, the one with the highest sum of scores. Raises ModelError."""
    scores = meta.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise ModelError(f"{file}: tokenizer.ggml.scores must be a number for each of the {len(tokens)} tokens")
    bos, eos = (_named(meta, tokens, name, file) for name in ("bos", "eos"))
    types, unknown = meta.get("tokenizer.ggml.token_type") or [], tokens.index(_named(meta, tokens, "unknown", file))
    pairs = list(zip(tokens, map(float, scores), strict=True))
    fast = FastTokenizer(Unigram(pairs, unk_id=unknown, byte_fallback=_BYTE in types))
    charsmap = meta.get("tokenizer.ggml.precompiled_charsmap")
    known = [normalizers.Precompiled(bytes(byte & 255 for byte in charsmap))] if charsmap else []
    spaces = [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), _MARK)]
    fast.normalizer = normalizers.Sequence(
        [*known, *(spaces if meta.get("tokenizer.ggml.remove_extra_whitespaces") else [])]
    )
    scheme = "always" if meta.get("tokenizer.ggml.add_space_prefix", True) else "never"
    fast.pre_tokenizer = pre_tokenizers.Metaspace(_MARK, scheme)
    fast.decoder = decoders.Metaspace(_MARK, scheme)
    ends = [(bos, tokens.index(bos)), (eos, tokens.index(eos))]
    fast.post_processor = processors.TemplateProcessing(
        single=[bos, "$A", eos], pair=[bos, "$A", eos, eos, "$B", eos], special_tokens=ends
    )
    return fast


def _piece(text: str) -> str:
    if text.startswith("[") and text.endswith("]"):
        return text
    return text[len(_MARK) :] if text.startswith(_MARK) else f"##{text}"


def _named(meta: Mapping[str, Any], tokens: list[str], name: str, file: str) -> str:
    id = named_id(meta, name)
    if id is None:
        raise ModelError(f"{file}: tokenizer.ggml.{name}_token_id is missing, or no token's")
    return tokens[id]
