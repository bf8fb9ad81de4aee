"""Text <-> token ids, and chat templates."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from kvloom.checkpoints.files import read_text
from kvloom.checkpoints.finding import find_weights
from kvloom.checkpoints.metadata import read_metadata
from kvloom.contract.config import MAX_COUNT
from kvloom.contract.errors import ModelError
from kvloom.engine.text.chat_template import ChatTemplates
from kvloom.engine.text.encoding import Encoder
from kvloom.engine.text.folder_tokens import MAX_ID, content, optional_object, read_fast, tokenizer_config
from kvloom.engine.text.gguf_ends import end_ids, named_id
from kvloom.engine.text.gguf_tokenizer import build_fast_tokenizer
from kvloom.engine.text.spelling import Spelling, is_byte_level, joined

_NAMES_IN_TEMPLATES = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OF_GGUF = {"unk_token": "unknown", "sep_token": "seperator", "pad_token": "padding"}  # its spelling


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Ids of the special tokens."""

    all_ids: frozenset[int]
    eos_ids: frozenset[int]  # end of an answer
    bos_id: int | None  # beginning of a text
    eos_id: int | None = None  # the one of eos_ids that ends a text; None = the smallest


class Tokenizer:
    """One model's tokenizer. `is_byte_level`: tokens are spelt in GPT-2's byte alphabet, else with U+2581 spaces."""

    def __init__(
        self,
        fast: FastTokenizer,
        special: SpecialTokens,
        is_byte_level: bool,
        templates: ChatTemplates,
        vocab_size: int | None = None,
    ) -> None:
        """vocab_size: above the largest id; None = the number of tokens, where no id is left out."""
        self._fast, self._encoder = fast, Encoder(fast, is_byte_level)
        self._special = special
        self._spelling = Spelling(fast, is_byte_level)
        self._is_byte_level = is_byte_level
        self._templates = templates
        self.eos_ids, self.bos_id = special.eos_ids, special.bos_id
        self.eos_id = min(special.eos_ids, default=None) if special.eos_id is None else special.eos_id
        self.vocab_size: int = vocab_size or fast.get_vocab_size(with_added_tokens=True)
        added = fast.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_texts = frozenset(token.content for i, token in added.items() if i in special.all_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self._fast, self._special, self._is_byte_level, self._templates, self.vocab_size)

    def encode(self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None) -> list[int]:
        """Lone surrogates become U+FFFD. With `max_tokens`, encoding may stop early: then more than `max_tokens` ids
        return.
        """
        return self._encoder.encode(text, add_special_tokens, max_tokens)

    def encode_within(self, text: str, max_tokens: int, add_special_tokens: bool = True) -> list[int]:
        """At most `max_tokens` ids: those of the text's beginning, and all that the tokenizer puts around a text, as
        transformers truncates. Lone surrogates become U+FFFD.
        """
        return self._encoder.encode_within(text, max_tokens, add_special_tokens)

    def encode_pair(self, first: str, second: str) -> tuple[list[int], int]:
        """Both texts with the tokens that the tokenizer puts around and between them, and the index where the second
        begins by its token types; 0 = they do not tell. Lone surrogates become U+FFFD.
        """
        return self._encoder.encode_pair(first, second)

    def encode_marked(
        self, text: str, marks: Mapping[str, str], add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """As `encode`, with each character of `marks` replaced by its original; a special token that contains a mark is
        plain text.
        """
        return self._encoder.encode_marked(text, marks, add_special_tokens, max_tokens)

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens, found without tokenising; 0 where the tokenizer guarantees none."""
        return self._encoder.least_tokens(text)

    def encode_inside(self, text: str, is_plain: bool = True) -> list[int]:
        """Ids of a text that continues another one: nothing is put before it. Special tokens are text if `is_plain`."""
        return self._encoder.encode_inside(text, is_plain)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary are dropped."""
        skipped = self._special.all_ids if skip_special_tokens else frozenset()
        return joined(self._spelling.begin([i for i in ids if 0 <= i < self.vocab_size and i not in skipped]))

    def prompt_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """What each token contributes to the text of the prompt `ids`; the tokens and the space that the tokenizer puts
        around every text contribute nothing.
        """
        before, after = self._encoder.ends()
        start = len(before) if list(ids[: len(before)]) == before else 0
        end = len(ids) - (len(after) if after and list(ids[-len(after) :]) == after else 0)
        return [b""] * start + self._spelling.begin(ids[start:end]) + [b""] * (len(ids) - max(start, end))

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it; "" for an id outside of it."""
        return self._fast.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token contributes to the text behind others; a special token's literal text."""
        return self._spelling.bytes_of(token_id)

    def is_added(self, token_id: int) -> bool:
        """Whether the token was added to the vocabulary: it is found in a text before the text is cut."""
        return token_id in self._added_ids

    def is_special(self, token_id: int) -> bool:
        """Whether the token is a special one."""
        return token_id in self._special.all_ids

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The conversation as the model's prompt. Raises BadRequest when the template refuses it or there is none."""
        return self._templates.apply(messages, tools, add_generation_prompt, **kwargs)

    def chat_template(self, has_tools: bool = False) -> str:
        """The template's own text; "" when there is none."""
        return self._templates.source(has_tools)


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a GGUF file. Raises ModelError when it has none that can be read."""
    path = find_weights(Path(path))
    try:
        return _load_folder(path) if path.is_dir() else _load_gguf(path)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception; other kinds are values of a wrong type
        raise ModelError(f"{path}: the tokenizer cannot be read: {error}") from error


def _load_gguf(path: Path) -> Tokenizer:
    meta = read_metadata(path)
    fast = build_fast_tokenizer(meta, str(path))
    for name in ("bos", "eos", "eot", "eom"):
        _ids(path, f"tokenizer.ggml.{name}_token_id", meta.get(f"tokenizer.ggml.{name}_token_id"))
    named = {name: named_id(meta, name) for name in ("bos", "eos")}
    prefix = "tokenizer.chat_template"
    templates = {k[len(prefix) + 1 :]: v for k, v in meta.items() if k.startswith(prefix + ".")}
    if prefix in meta:
        templates["default"] = meta[prefix]
    return Tokenizer(
        fast,
        SpecialTokens(_special_ids(fast), end_ids(meta), named["bos"], named["eos"]),
        is_byte_level=meta["tokenizer.ggml.model"] == "gpt2",
        templates=ChatTemplates(
            templates,
            {f"{name}_token": "" if id is None else fast.id_to_token(id) for name, id in named.items()}
            | {name: fast.id_to_token(id) for name, key in _OF_GGUF.items() if (id := named_id(meta, key)) is not None},
        ),
    )


def _load_folder(folder: Path) -> Tokenizer:
    config = tokenizer_config(folder)
    fast = read_fast(folder, config)
    fast.no_truncation()  # encoders' files ask for truncation and padding
    fast.no_padding()
    eos = (optional_object(folder / "config.json") | optional_object(folder / "generation_config.json")).get(
        "eos_token_id"
    )
    bos_token, eos_token = content(config.get("bos_token")), content(config.get("eos_token"))
    eos_id = fast.token_to_id(eos_token)
    ids = _ids(folder, "eos_token_id", eos) | ({eos_id} if eos_id is not None else set())
    largest = max(fast.get_vocab(with_added_tokens=True).values(), default=0)
    if largest > MAX_ID:
        raise ModelError(f"{folder / 'tokenizer.json'}: token id {largest} is more than {MAX_ID}")
    return Tokenizer(
        fast,
        SpecialTokens(_special_ids(fast), frozenset(ids), fast.token_to_id(bos_token), eos_id),
        is_byte_level=is_byte_level(fast.decoder),
        templates=ChatTemplates(_folder_templates(folder, config), _named(config, bos_token, eos_token)),
        vocab_size=largest + 1,
    )


def _ids(path: Path, name: str, named: Any) -> set[int]:
    """What a file names by an id, a list of them, or null. Raises ModelError."""
    ids = named if isinstance(named, list) else [] if named is None else [named]
    if any(not isinstance(i, int) or isinstance(i, bool) or abs(i) > MAX_COUNT for i in ids):
        raise ModelError(f"{path}: {name} must be a token id, or a list of them, got {json.dumps(named)[:100]}")
    return set(ids)


def _special_ids(fast: FastTokenizer) -> frozenset[int]:
    return frozenset(i for i, token in fast.get_added_tokens_decoder().items() if token.special)


def _named(config: Mapping[str, Any], bos_token: str, eos_token: str) -> dict[str, str]:
    """The texts of special tokens that templates may read, as transformers gives them; those of no value are unset."""
    others = {name: content(config.get(name)) for name in _NAMES_IN_TEMPLATES}
    return {"bos_token": bos_token, "eos_token": eos_token} | {name: text for name, text in others.items() if text}


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; a template file wins over the configuration."""
    stored = config.get("chat_template") or {}
    if isinstance(stored, list):
        stored = {entry["name"]: entry["template"] for entry in stored}
    elif isinstance(stored, str):
        stored = {"default": stored}
    path, more = folder / "chat_template.jinja", sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {each.stem: read_text(each) for each in more}  # as transformers saves them
    return dict(stored) | files | ({"default": read_text(path)} if path.exists() else {})
