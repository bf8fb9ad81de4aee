"""Where answers of GGUF files end, which name one end of several; and other defaults that the files leave unsaid."""

from typing import Any

import pytest

from kvloom.engine.text.gguf_ends import end_ids, named_id, token_types
from kvloom.engine.text.gguf_tokenizer import build_fast_tokenizer
from kvloom.engine.text.splits import SPLITTINGS
from tests.support.models.vocabularies import byte_letters

NORMAL, CONTROL = 1, 3


def meta(*tokens: str, model: str = "gpt2", **fields: Any) -> dict[str, Any]:
    told = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    return {"tokenizer.ggml.model": model, "tokenizer.ggml.tokens": list(tokens), **told}


def ends(*tokens: str, **fields: Any) -> set[str]:
    return {tokens[id] for id in end_ids(meta(*tokens, **fields))}


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        (("<eos>", "<start_of_turn>", "<end_of_turn>"), {"<eos>", "<end_of_turn>"}),  # Gemma 2 and 3
        (("</s>", "<|user|>", "<|end|>", "<|endoftext|>"), {"</s>", "<|end|>", "<|endoftext|>"}),  # Phi-3
        (("<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"), {"<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"}),  # Llama 3
        (("<|end|>", "<|return|>", "<|call|>", "<|message|>"), {"<|return|>", "<|call|>"}),  # gpt-oss
        (("<|end|>", "<|flush|>", "<|calls|>"), {"<|flush|>", "<|calls|>"}),  # Solar Open
        (("<|end|>", "<|return|>"), {"<|end|>", "<|return|>"}),
        (("</s>", "<turn|>", "<|tool_response>"), {"<turn|>", "<|tool_response>"}),  # Gemma 4
        (("<|im_end|>", "<|file_sep|>", "<|repo_name|>", "<|fim_pad|>", "<|fim_middle|>"),
         {"<|im_end|>", "<|file_sep|>", "<|repo_name|>", "<|fim_pad|>"}),  # Qwen2.5-Coder
        (("a", "b"), set()),
    ],
)  # fmt: skip
def test_ends_are_known_by_their_spelling(tokens: tuple[str, ...], wanted: set[str]):
    assert ends(*tokens) == wanted


def test_what_the_file_names_ends_too_and_what_is_outside_the_vocabulary_does_not():
    assert ends("a", "b", "c", "d", eos_token_id=1, eot_token_id=2, eom_token_id=-1, fim_sep_token_id=9) == {"b", "c"}


def test_a_sentence_piece_file_that_names_none_has_its_kinds():
    told = meta("<unk>", "<s>", "</x>", model="llama")
    assert [named_id(told, name) for name in ("unknown", "bos", "eos")] == [0, 1, 2]
    assert end_ids(told) == {2}
    assert named_id(meta("a", "b"), "bos") is None


def test_an_end_is_a_control_token_whatever_the_file_says():
    told = meta("a", "<|im_end|>", "b", token_type=[NORMAL] * 3)
    assert token_types(told) == [NORMAL, CONTROL, NORMAL]
    assert token_types(meta("a", "</s>")) == [NORMAL, CONTROL]


@pytest.mark.parametrize(
    ("name", "strips"), [("Phi-3-mini", True), ("my PHI3 merge", True), ("Phi 4", False), ("", False)]
)
def test_special_tokens_of_files_named_phi_3_take_the_white_space_behind_them(name: str, strips: bool):
    letters = ["▁", "a", "b", "\n", "▁a", "▁b"]
    told = meta(
        "<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "<|tag|>", *letters,
        model="llama", token_type=[2, 3, 3, 3, 3, 4, *[NORMAL] * 6], scores=[0.0] * 12,
    ) | {"general.name": name}  # fmt: skip
    found = build_fast_tokenizer(told, "test").encode("<|user|>\na b<|end|>\n<|tag|> a", add_special_tokens=False)
    assert [told["tokenizer.ggml.tokens"][id] for id in found.ids] == (
        ["<|user|>", "▁a", "▁b", "<|end|>", "<|tag|>", "▁a"]
        if strips
        else ["<|user|>", "▁", "\n", "a", "▁b", "<|end|>", "▁", "\n", "<|tag|>", "▁", "▁a"]
    )


@pytest.mark.parametrize(
    ("pre", "begins"),
    [("llama-bpe", True), ("llama-v3", True), ("falcon3", True), ("tekken", True), ("qwen2", False), ("dbrx", False)],
)
def test_texts_begin_with_bos_where_the_models_do(pre: str, begins: bool):
    told = meta("<s>", *byte_letters(), pre=pre, bos_token_id=0, token_type=[3, *[NORMAL] * 256])
    assert (build_fast_tokenizer(told, "test").encode("a").ids[0] == 0) is begins
    told["tokenizer.ggml.add_bos_token"] = not begins
    assert (build_fast_tokenizer(told, "test").encode("a").ids[0] == 0) is not begins


@pytest.mark.parametrize(
    ("name", "others"),
    [
        ("qwen2", "deepseek-r1-qwen kormo f2llmv2 megrez"),
        ("llama-bpe", "llama3 llama-v3 falcon3 pixtral midm-2.0 lfm2"),
        ("gpt-4o", "llama4 kanana2 talkie"),
        ("gpt-2", "phi-2 exaone4 mellum gigachat a.x-4.0 olmo"),
        ("smollm", "refact starcoder command-r"),
    ],
)
def test_names_in_other_words_split_alike(name: str, others: str):
    assert {SPLITTINGS[other].patterns for other in others.split()} == {SPLITTINGS[name].patterns}
