"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from kvloom.contract.errors import ModelError
from kvloom.engine.text.gguf_ends import CONTROL, named_id, token_types
from kvloom.engine.text.gguf_words import scored_pieces, word_pieces
from kvloom.engine.text.splits import SPLITTINGS, Splitting

UNKNOWN, USER_DEFINED = 2, 4  # token types of GGUF
_NEVER_STRIPPED = ("<unk>", "<s>", "<|endoftext|>")

_OF_ENCODERS = {"bert": word_pieces, "t5": scored_pieces}  # which have ends of their own
_MAX_PIECE = 4096  # characters of a token, which is cut at each of them; those of known vocabularies have below 100


def build_fast_tokenizer(meta: Mapping[str, Any], file: str) -> FastTokenizer:
    """Raises ModelError when the file has no tokenizer or one of a kind that is not known."""
    kind, tokens = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.tokens")
    if not kind or not tokens:
        raise ModelError(f"{file}: holds no tokenizer (tokenizer.ggml.model and .tokens)")
    with_bos = True
    if kind == "gpt2":
        splitting = _splitting(meta, file)
        fast, with_bos = _byte_level(meta, tokens, splitting), splitting.with_bos
    elif kind == "llama":
        fast = _sentence_piece(meta, tokens, file)
    elif kind == "gemma4":
        fast = _marked_bpe(meta, tokens)
    elif kind in _OF_ENCODERS:
        fast = _OF_ENCODERS[kind](meta, tokens, file)
    else:
        raise ModelError(f"{file}: tokenizer {kind!r} is not known; known are gpt2, llama, gemma4, bert and t5")
    fast.add_tokens(_added(meta, tokens))  # all at once: each call walks through all of them
    if kind not in _OF_ENCODERS:
        _add_ends(fast, meta, tokens, with_bos)
    return fast


def _added(meta: Mapping[str, Any], tokens: Sequence[str]) -> list[AddedToken]:
    """The tokens that are found in a text before it is split."""
    types = token_types(meta)
    strips = _strips_behind(meta)
    return [
        AddedToken(text, normalized=False, special=kind != USER_DEFINED, rstrip=strips and text not in _NEVER_STRIPPED)
        for text, kind in zip(tokens, types, strict=False)
        if kind in (CONTROL, USER_DEFINED) or (kind == UNKNOWN and meta["tokenizer.ggml.model"] != "gpt2")
    ]


def _strips_behind(meta: Mapping[str, Any]) -> bool:
    """Whether special tokens take the white space behind them. Files do not say so: llama.cpp goes by the name."""
    return any(name in str(meta.get("general.name", "")).lower() for name in ("phi-3", "phi3"))


def _splitting(meta: Mapping[str, Any], file: str) -> Splitting:
    pre = meta.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITTINGS:
        raise ModelError(f"{file}: pre-tokenizer {pre!r} is not known; known are {', '.join(SPLITTINGS)}")
    return SPLITTINGS[pre]


def _merges(meta: Mapping[str, Any]) -> list[tuple[str, str]]:
    halves = (merge.partition(" ") for merge in meta.get("tokenizer.ggml.merges") or [])
    return [(left, right) for left, _, right in halves]


def _byte_level(meta: Mapping[str, Any], tokens: list[str], splitting: Splitting) -> FastTokenizer:
    vocab = {text: i for i, text in enumerate(tokens)}
    fast = FastTokenizer(BPE(vocab, _merges(meta), ignore_merges=splitting.ignores_merges))
    fast.pre_tokenizer = splitting.pre_tokenizer()
    if splitting.composes:
        fast.normalizer = normalizers.NFC()
    fast.decoder = decoders.ByteLevel()
    return fast


def _marked_bpe(meta: Mapping[str, Any], tokens: list[str]) -> FastTokenizer:
    """Merges over whole lines, with U+2581 for spaces; newlines stay together."""
    vocab = {text: i for i, text in enumerate(tokens)}
    fast = FastTokenizer(BPE(vocab, _merges(meta), byte_fallback=True, ignore_merges=True))
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), "isolated")
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return fast


def _sentence_piece(meta: Mapping[str, Any], tokens: list[str], file: str) -> FastTokenizer:
    """Merges follow from the scores: of all ways to join two tokens into a third, the best-scored comes first."""
    vocab = {text: i for i, text in enumerate(tokens)}
    scores = meta.get("tokenizer.ggml.scores") or [-float(i) for i in range(len(tokens))]
    pairs = []
    longest = max(map(len, vocab), default=0)
    if longest > _MAX_PIECE:
        raise ModelError(f"{file}: a token has {longest} characters, more than {_MAX_PIECE}")
    for text, i in vocab.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocab and right in vocab:
                pairs.append((-scores[i], vocab[left], vocab[right], left, right))
    merges = [(left, right) for *_, left, right in sorted(pairs)]
    unknown = tokens[named_id(meta, "unknown") or 0]
    fast = FastTokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    fast.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return fast


def _add_ends(fast: FastTokenizer, meta: Mapping[str, Any], tokens: list[str], with_bos: bool) -> None:
    """Add the begin and end tokens around each text that the file asks for."""
    bos, eos = (named_id(meta, name) for name in ("bos", "eos"))
    pieces, ids = ["$A"], []
    if meta.get("tokenizer.ggml.add_bos_token", with_bos) and bos is not None:
        pieces.insert(0, tokens[bos])
        ids.append((tokens[bos], bos))
    if meta.get("tokenizer.ggml.add_eos_token", False) and eos is not None:
        pieces.append(tokens[eos])
        ids.append((tokens[eos], eos))
    if ids:
        fast.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)
