r"""How byte-level tokenizers of GGUF files split a text before they merge its bytes, by `tokenizer.ggml.pre`.

Each name stands for patterns that split one after the other: each cuts what the ones before it left whole. They are
those of the models' own tokenizers, which llama.cpp also follows (src/llama-vocab.cpp). A name that is not listed is
refused, because a wrong split gives other tokens than the model was trained on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD, _BLANK = r"[^\r\n\p{L}\p{N}]?\p{L}+", r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r"| ?[^\s\p{L}\p{N}]+"
_REST = _MARKS + r"[\r\n]*" + _BLANK
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ANY = r"[^\r\n\p{L}\p{N}]?"
_SLASHES = _MARKS + r"[\r\n/]*" + _BLANK
_CASED = f"{_ANY}{_UPPER}*{_LOWER}+{_ENDING}?|{_ANY}{_UPPER}+{_LOWER}*{_ENDING}?"
_O200K = _CASED + r"|\p{N}{1,3}" + _SLASHES
_SYMBOL = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
_KANA = r"[一-龥぀-ゟ゠-ヿ]+"
_LATIN = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄ"
    "ῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DIGIT = r"\p{N}"
_PATTERNS: dict[str, tuple[str, ...]] = {
    "gpt-2": (GPT2,),
    "smollm": (DIGIT, GPT2),
    "qwen2": (f"{_ENDING}|{_WORD}" + r"|\p{N}" + _REST,),
    "qwen35": (_ENDING + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _BLANK,),
    "llama-bpe": (f"{_ENDING}|{_WORD}" + r"|\p{N}{1,3}" + _REST,),
    "minicpm5": (r"\p{N}{1,3}", f"{_ENDING}|{_WORD}" + r"|\p{N}+" + _REST),
    "gpt-4o": (_O200K,),
    "tekken": (f"{_ANY}{_UPPER}*{_LOWER}+|{_ANY}{_UPPER}+{_LOWER}*" + r"|\p{N}" + _SLASHES,),
    "seed-coder": (f"{_ENDING}|{_WORD}" + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _BLANK,),
    "deepseek-llm": (
        r"[\r\n]", rf"\s?[{_LATIN}]+", r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", DIGIT),
    "deepseek-v3": (r"\p{N}{1,3}", _KANA, _SYMBOL + r"| ?[\p{P}\p{S}]+[\r\n]*" + _BLANK),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"),
    "bloom": (r" ?[^(\s|.,!?…。，、।۔،)]+",),
    "viking": (r" ?[^(\s|.,!?…。，、।۔،)]+", DIGIT),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}  # fmt: skip
_ALSO = {  # other names of the same
    "gpt-2": "phi-2 olmo mpt jais exaone4 gigachat a.x-4.0 mellum trillion granite-docling",
    "smollm": "refact starcoder command-r codeshell exaone minerva-7b mellum2",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4 glm5",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
    "deepseek-v3": "hunyuan-dense joyai-llm hy_v4",
    "bloom": "poro-chat gpt3-finnish",
}
_LLAMA3 = frozenset(["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"])


@dataclass(frozen=True, slots=True)
class Splitting:
    """What a name says. `ignores_merges`: a piece that is a token is one; `with_bos`: texts begin with the BOS token
    where the file does not say; `composes`: the model's own tokenizer applies NFC.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    with_bos: bool = False
    composes: bool = False

    def pre_tokenizer(self) -> Any:
        """Of the `tokenizers` library, to bytes in GPT-2's alphabet."""
        has_gpt2 = self.patterns[-1] == GPT2
        patterns = self.patterns[:-1] if has_gpt2 else self.patterns
        steps = [_split(pattern) for pattern in patterns]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(False, use_regex=has_gpt2)])


def _split(pattern: str) -> Any:
    if pattern == DIGIT:
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _splittings() -> Mapping[str, Splitting]:
    found = {}
    for name, patterns in _PATTERNS.items():
        for pre in (name, *_ALSO.get(name, "").split()):
            found[pre] = Splitting(
                patterns,
                ignores_merges=pre in _LLAMA3 or pre in ("tekken", "minicpm5", "glm4", "glm5"),
                with_bos=pre in _LLAMA3 or pre == "tekken",
                composes=pre == "qwen2",
            )
    return found


SPLITTINGS = _splittings()
