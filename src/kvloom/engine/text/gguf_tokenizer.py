"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import BPE

from kvloom.contract.errors import ModelError

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # token types of GGUF

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDINGS}"
)
SPLITS = {  # tokenizer.ggml.pre -> how text is split before the byte-level merges
    "llama-bpe": WORDS + r"\p{N}{1,3}" + REST,
    "llama3": WORDS + r"\p{N}{1,3}" + REST,
    "dbrx": WORDS + r"\p{N}{1,3}" + REST,
    "gpt-4o": O200K + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": WORDS + r"\p{N}" + REST,
}
GPT2_LIKE = ("gpt-2", "default", "olmo", "smollm", "refact")
_MAX_PIECE = 4096  # characters of a token, which is cut at each of them; those of known vocabularies have below 100
_SINGLE_DIGITS = ("smollm", "refact")


def build_fast_tokenizer(meta: Mapping[str, Any], file: str) -> FastTokenizer:
    """Raises ModelError when the file has no tokenizer or one of a kind that is not known."""
    kind, tokens = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.tokens")
    if not kind or not tokens:
        raise ModelError(f"{file}: holds no tokenizer (tokenizer.ggml.model and .tokens)")
    if kind == "gpt2":
        fast, with_bos = _byte_level(meta, tokens, file), False
    elif kind == "llama":
        fast, with_bos = _sentence_piece(meta, tokens, file), True
    else:
        raise ModelError(f"{file}: tokenizer {kind!r} is not known; known are gpt2 and llama")
    types = meta.get("tokenizer.ggml.token_type") or []
    fast.add_tokens(  # all at once: each call walks through all of them
        [
            AddedToken(text, normalized=False, special=token_type != USER_DEFINED)
            for text, token_type in zip(tokens, types, strict=False)
            if token_type in (CONTROL, USER_DEFINED) or (token_type == UNKNOWN and kind == "llama")
        ]
    )
    _add_ends(fast, meta, tokens, with_bos)
    return fast


def _byte_level(meta: Mapping[str, Any], tokens: list[str], file: str) -> FastTokenizer:
    pre = meta.get("tokenizer.ggml.pre", "default")
    if pre not in SPLITS and pre not in GPT2_LIKE:
        known = ", ".join([*SPLITS, *GPT2_LIKE])
        raise ModelError(f"{file}: pre-tokenizer {pre!r} is not known; known are {known}")
    merges = [tuple(merge.split(" ", 1)) for merge in meta.get("tokenizer.ggml.merges") or []]
    vocab = {text: i for i, text in enumerate(tokens)}
    fast = FastTokenizer(BPE(vocab, merges, ignore_merges=pre in ("llama-bpe", "llama3")))
    if pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")
        fast.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in _SINGLE_DIGITS else []
        fast.pre_tokenizer = pre_tokenizers.Sequence([*digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if pre == "qwen2":
        fast.normalizer = normalizers.NFC()
    fast.decoder = decoders.ByteLevel()
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
    unknown = tokens[meta.get("tokenizer.ggml.unknown_token_id", 0)]
    fast = FastTokenizer(BPE(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [normalizers.Prepend("▁")] if has_prefix else []
    fast.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return fast


def _add_ends(fast: FastTokenizer, meta: Mapping[str, Any], tokens: list[str], with_bos: bool) -> None:
    """Add the begin and end tokens around each text that the file asks for."""
    bos, eos = (meta.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos"))
    pieces, ids = ["$A"], []
    if meta.get("tokenizer.ggml.add_bos_token", with_bos) and bos is not None:
        pieces.insert(0, tokens[bos])
        ids.append((tokens[bos], bos))
    if meta.get("tokenizer.ggml.add_eos_token", False) and eos is not None:
        pieces.append(tokens[eos])
        ids.append((tokens[eos], eos))
    if ids:
        fast.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=ids)
