"""Tokenizers against transformers, exact bytes of tokens, and chat templates in a sandbox."""

import json
import pickle
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, normalizers
from tokenizers.models import BPE

from kvloom.contract.errors import BadRequest, ModelError
from kvloom.engine.text.chat_template import ChatTemplates
from kvloom.engine.text.gguf_tokenizer import build_fast_tokenizer
from kvloom.engine.text.tokenizer import SpecialTokens, Tokenizer, load_tokenizer
from tests.support.kept import kept

TRICKY = (
    "",
    "Hello world",
    "  lead   and trail  ",
    "tabs\tand\r\nlines\n\n\n",
    "1234567.89 in 2024",
    "it's WE'LL don't",
    "é e\u0301 a\u0308",
    "你好，世界 русский العربية ไทย",
    "👩‍🚀🧵",
    "def f(x):\n\t return  x+1  # ok",
    "<|im_start|>user\nhi<|im_end|>",
    "\x00\x1f\u200b",
)


@pytest.fixture(scope="module")
def smollm2(smollm2_path) -> Tokenizer:
    return load_tokenizer(smollm2_path)


@pytest.fixture(scope="module")
def theirs(smollm2_path) -> dict[str, list[int]]:
    """The ids that transformers gives each text. The results are kept, because it takes seconds to read the file."""

    def ask(path: Path) -> None:
        automatic = import_module("transformers").AutoTokenizer
        tokenizer = automatic.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
        path.write_text(json.dumps({text: tokenizer(text).input_ids for text in TRICKY}))

    causes = (Path(__file__).read_bytes(), version("transformers").encode(), str(smollm2_path.stat().st_size).encode())
    return json.loads(kept(causes, "ids.json", ask).read_text())


@pytest.mark.parametrize("text", TRICKY)
def test_a_gguf_tokenizer_gives_the_ids_of_transformers_and_round_trips(smollm2, theirs, text):
    ids = smollm2.encode(text)
    assert ids == theirs[text]
    assert smollm2.decode(ids, skip_special_tokens=False) == text
    assert b"".join(map(smollm2.token_bytes, ids)) == text.encode()


@given(st.text(max_size=60))
def test_token_bytes_of_any_text_join_to_it(text):
    tokenizer = _BYTE_LEVEL
    clean = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == clean.encode()


def test_lone_surrogates_become_replacement_characters(smollm2):
    assert smollm2.decode(smollm2.encode("a\ud83eb")) == "a\ufffdb"


def test_ends_and_special_tokens(smollm2):
    assert [smollm2.token_text(id) for id in sorted(smollm2.eos_ids)] == ["<|endoftext|>", "<|im_end|>", "<reponame>"]
    assert smollm2.eos_id == 2
    assert smollm2.bos_id == 1
    assert smollm2.is_special(2)
    assert not smollm2.is_special(19556)
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert smollm2.decode([2, 19556]) == "Hello"
    assert smollm2.vocab_size == 49152


def test_the_chat_template_inside_a_gguf_file(smollm2):
    text = smollm2.apply_chat_template([{"role": "system", "content": "S"}, {"role": "user", "content": "U"}])
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    assert not smollm2.apply_chat_template([{"role": "user", "content": "U"}], add_generation_prompt=False).endswith(
        "assistant\n"
    )


def byte_level_folder(folder: Path, **config: Any) -> Path:
    """A Hugging Face folder with a small byte-level tokenizer."""
    _fast_byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text('{"eos_token_id": 3}')
    return folder


def _fast_byte_level() -> FastTokenizer:
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*_byte_tokens(), "<eos>"],
        "tokenizer.ggml.token_type": [1] * 256 + [3],
        "tokenizer.ggml.eos_token_id": 256,
    }
    return build_fast_tokenizer(meta, "test")


def _byte_tokens() -> list[str]:
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(256, 512))
    return [chr(b) if b in kept else chr(next(moved)) for b in range(256)]


_BYTE_LEVEL = Tokenizer(
    _fast_byte_level(),
    SpecialTokens(frozenset({256}), frozenset({256}), None),
    is_byte_level=True,
    templates=ChatTemplates({}, {}),
)


def test_a_folder_names_its_ends_and_its_templates(tmp_path):
    folder = byte_level_folder(tmp_path, eos_token={"content": "<eos>"}, chat_template="{{ messages[0].content }}!")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_ids == {3, 256}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi!"
    (folder / "chat_template.jinja").write_text("{{ messages|length }}{{ eos_token }}")
    assert load_tokenizer(folder).apply_chat_template([{}]) == "1<eos>"


def test_ends_are_those_of_the_generation_config_before_those_of_the_model(tmp_path):
    folder = byte_level_folder(tmp_path)
    assert load_tokenizer(folder).eos_ids == {3}
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert load_tokenizer(folder).eos_ids == {4, 5}


def told(text: str, **flags: bool) -> dict[str, Any]:
    """A token as tokenizer_config.json has it."""
    return {"content": text, "special": True, "lstrip": False, "rstrip": False, "normalized": False, **flags}


@pytest.mark.parametrize(
    ("config", "wanted"),  # ids of a<x>b<y>c<pad>; letters are 97 to 99, 257 is the first that is free
    [
        ({}, ["<x>", "<y>", "<pad>"]),
        ({"added_tokens_decoder": {"257": told("<x>")}}, [257, "<y>", "<pad>"]),
        ({"added_tokens_decoder": {"300": told("<x>"), "257": told("<y>", special=False)}}, [300, 257, "<pad>"]),
        ({"additional_special_tokens": ["<x>", "<y>"]}, [257, 258, "<pad>"]),
        ({"additional_special_tokens": [told("<y>")], "pad_token": told("<pad>")}, ["<x>", 258, 257]),
        ({"extra_special_tokens": {"image_token": "<x>"}}, [257, "<y>", "<pad>"]),
        ({"pad_token": "<pad>", "unk_token": "<y>", "eos_token": "<x>"}, [257, 258, 259]),
    ],
)
def test_tokens_that_only_the_configuration_has_are_tokens(tmp_path, config: dict[str, Any], wanted: list[Any]):
    tokenizer = load_tokenizer(byte_level_folder(tmp_path, **config))
    spelt = [ord(c) for c in "a"], [ord(c) for c in "b"], [ord(c) for c in "c"]
    ids: list[int] = []
    for letter, token in zip(spelt, wanted, strict=True):
        ids += letter + ([token] if isinstance(token, int) else [ord(c) for c in token])
    byte_ids = {tokenizer.token_bytes(i)[0]: i for i in range(256)}
    assert tokenizer.encode("a<x>b<y>c<pad>") == [byte_ids[i] if i < 256 else i for i in ids]
    assert pickle.loads(pickle.dumps(tokenizer)).decode(tokenizer.encode("a<x>b"), skip_special_tokens=False) == "a<x>b"
    assert tokenizer.vocab_size == max([257, *(i + 1 for i in wanted if isinstance(i, int))])


def test_they_are_special_as_the_configuration_says(tmp_path):
    tokens = {"257": told("<x>"), "258": told("<y>", special=False), "259": told("<z>", rstrip=True)}
    tokenizer = load_tokenizer(byte_level_folder(tmp_path, added_tokens_decoder=tokens))
    assert [tokenizer.is_special(i) for i in (257, 258, 259)] == [True, False, True]
    assert tokenizer.encode("<z> \n<y>") == [259, 258]
    assert tokenizer.decode([257, 258]) == "<y>"


def test_a_token_at_the_id_of_another_one_is_named(tmp_path):
    folder = byte_level_folder(tmp_path, added_tokens_decoder={"256": told("<x>")})
    with pytest.raises(ModelError, match=r"token 256 is '<eos>', but '<x>' in tokenizer_config\.json"):
        load_tokenizer(folder)


def test_older_files_that_name_tokens_are_read_too(tmp_path):
    folder = byte_level_folder(tmp_path)
    (folder / "added_tokens.json").write_text('{"<x>": 257}')
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": told("<eos>"), "bos_token": "<x>"}))
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.eos_ids, tokenizer.eos_id, tokenizer.bos_id) == ({3, 256}, 256, 257)
    folder = byte_level_folder(tmp_path, eos_token="<y>")
    assert load_tokenizer(folder).eos_id == 256, "the map has the last word"


def test_files_may_begin_with_a_byte_order_mark(tmp_path):
    folder = byte_level_folder(tmp_path, eos_token="<eos>", chat_template="{{ messages|length }}")
    (folder / "chat_template.jinja").write_text("{{ messages|length }}!")
    wanted = load_tokenizer(folder).encode("hello")
    for path in folder.iterdir():
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.encode("hello"), tokenizer.eos_ids) == (wanted, {3, 256})
    assert tokenizer.apply_chat_template([{}]) == "1!"


def test_templates_by_name_and_with_arguments(tmp_path):
    templates = [
        {"name": "default", "template": "{% if thinking %}T{% endif %}{% generation %}D{% endgeneration %}"},
        {"name": "tool_use", "template": "{{ tools|tojson }}"},
    ]
    tokenizer = load_tokenizer(byte_level_folder(tmp_path, chat_template=templates))
    assert tokenizer.apply_chat_template([], thinking=True) == "TD"
    assert tokenizer.apply_chat_template([], tools=[{"é": 1}]) == '[{"é": 1}]'


def test_templates_that_transformers_saves_in_a_folder_are_found_by_their_names(tmp_path):
    """additional_chat_templates/, as save_pretrained of transformers 5.24 writes it."""
    folder = byte_level_folder(tmp_path, chat_template="{{ messages|length }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools|length }} tools")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.apply_chat_template([{}]) == "1"
    assert tokenizer.apply_chat_template([{}], tools=[{}, {}]) == "2 tools"


def test_a_template_may_read_every_special_token_that_has_a_name(tmp_path):
    tokens = {"bos_token": "<s>", "pad_token": {"content": "<pad>"}, "unk_token": "<unk>"}
    template = "{{ bos_token }}{{ pad_token }}{{ unk_token }}{{ sep_token }}"
    folder = byte_level_folder(tmp_path, chat_template=template, **tokens)
    assert load_tokenizer(folder).apply_chat_template([]) == "<s><pad><unk>"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.clear() }}", "refuses them"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses them"),
        ("{% for %}", "refuses them"),
        ("{{ messages[0].content + 1 }}", "refuses them"),
        ("{{ 'x' * 10 ** 12 }}", r"\* makes more than 16777216 characters"),
        ("{{ 10 ** 10 * [1] }}", r"\* makes more than 16777216 characters, items"),
        ("{{ 9 ** (9 ** 9) }}", r"\*\* makes more than 16777216 characters, items or bits"),
        ("{{ 1 / 0 }}", "division by zero"),
        (
            "{% for i in range(9999) %}{% for j in range(999) %}{% endfor %}{% endfor %}",
            "do not end within 3000000 steps",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls are more than 100 deep"),
    ],
)
def test_a_template_that_fails_or_reaches_out_of_its_sandbox_is_a_bad_request(tmp_path, template, words):
    tokenizer = load_tokenizer(byte_level_folder(tmp_path, chat_template=template))
    with pytest.raises(BadRequest, match=words) as caught:
        tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert caught.value.field == "messages"


def test_loops_are_counted_and_know_where_they_are(tmp_path):
    each = "{{ loop.index }}/{{ loop.length }}{{ item }}{{ loop.last }} "
    template = f"{{% for item in values if item != 'b' %}}{each}{{% else %}}none{{% endfor %}}"
    templates = load_tokenizer(byte_level_folder(tmp_path, chat_template=template))
    assert templates.apply_chat_template([], values=["a", "b", "c"]) == "1/2aFalse 2/2cTrue "
    assert templates.apply_chat_template([], values={"a": 1}) == "1/1aTrue "
    assert templates.apply_chat_template([]) == "none"


def test_what_one_rendering_has_done_is_not_counted_in_the_next(tmp_path):
    template = "{% for i in range(99999) %}{% for j in range(20) %}{% endfor %}{% endfor %}x"
    tokenizer = load_tokenizer(byte_level_folder(tmp_path, chat_template=template))
    assert [tokenizer.apply_chat_template([]) for _ in range(2)] == ["x", "x"]


@pytest.mark.parametrize("named", ["x", ["x"], 1.5, True, 10**30, [3, 2**31], {"id": 3}])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_that_is_no_token_id_is_refused_by_its_name(tmp_path, file, named):
    folder = byte_level_folder(tmp_path)
    (folder / file).write_text(json.dumps({"eos_token_id": named}))
    with pytest.raises(ModelError, match="eos_token_id must be a token id, or a list of them, got"):
        load_tokenizer(folder)


@pytest.mark.parametrize("id", [(1 << 22) + 1, (1 << 32) - 1])
def test_a_token_far_behind_the_others_is_refused(tmp_path, id):
    folder = byte_level_folder(tmp_path)
    move_token(folder / "tokenizer.json", "a", id)
    with pytest.raises(ModelError, match=rf"tokenizer\.json: token id {id} is more than 4194304"):
        load_tokenizer(folder)


def test_tokens_behind_a_gap_are_tokens(tmp_path):
    folder = byte_level_folder(tmp_path)
    move_token(folder / "tokenizer.json", "a", 999)
    tokenizer = pickle.loads(pickle.dumps(load_tokenizer(folder)))
    assert tokenizer.encode("a", add_special_tokens=False) == [999]
    assert tokenizer.vocab_size == 1000
    assert (tokenizer.decode([999]), tokenizer.token_bytes(999), tokenizer.token_bytes(500)) == ("a", b"a", b"")


def move_token(path: Path, token: str, id: int) -> None:
    document = json.loads(path.read_text())
    document["model"]["vocab"][token] = id
    path.write_text(json.dumps(document))


def test_a_model_without_a_template_says_so(tmp_path):
    with pytest.raises(BadRequest, match="no chat template; use completions"):
        load_tokenizer(byte_level_folder(tmp_path)).apply_chat_template([])


SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "▁a", "ab", "▁ab"]
SPM_META = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": SPM_TOKENS,
    "tokenizer.ggml.scores": [0.0] * 262 + [-3.0, -2.0, -1.0],
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 6],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


def sentence_piece(**meta: Any) -> Tokenizer:
    values = SPM_META | {f"tokenizer.ggml.{key}": value for key, value in meta.items()}
    return Tokenizer(
        build_fast_tokenizer(values, "test"),
        SpecialTokens(frozenset({0, 1, 2}), frozenset({2}), 1),
        is_byte_level=False,
        templates=ChatTemplates({}, {}),
    )


@pytest.mark.parametrize("template", ["{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "{{ messages|tojson }}"])
def test_what_is_nested_too_deeply_for_a_template_is_refused(template):
    deep: list[object] = []
    for _ in range(9999):
        deep = [deep]
    with pytest.raises(BadRequest, match=r"^messages: the model's chat template refuses them: maximum recursion depth"):
        ChatTemplates({"default": template}, {}).apply([{"content": deep}], None, add_generation_prompt=True)


def test_a_token_without_end_is_refused_before_it_is_cut():
    with pytest.raises(ModelError, match="test: a token has 1000000 characters, more than 4096"):
        sentence_piece(tokens=[*SPM_TOKENS, "a" * 1_000_000])


def test_a_sentence_piece_tokenizer_merges_by_score_begins_with_bos_and_falls_back_to_bytes():
    tokenizer = sentence_piece()
    assert [tokenizer.token_text(i) for i in tokenizer.encode("ab")] == ["<s>", "▁ab"]
    ids = tokenizer.encode("é", add_special_tokens=False)
    assert [tokenizer.token_text(i) for i in ids] == ["▁", "<0xC3>", "<0xA9>"]
    assert b"".join(map(tokenizer.token_bytes, ids)) == " é".encode()
    assert tokenizer.decode(ids) == "é"
    assert sentence_piece(add_bos_token=False).encode("ab") == [SPM_TOKENS.index("▁ab")]
    assert sentence_piece(add_eos_token=True).encode("ab")[-1] == 2


@pytest.mark.parametrize(
    ("meta", "words"),
    [
        ({}, "holds no tokenizer"),
        ({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]}, "tokenizer 'rwkv' is not known"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.pre": "odd"},
            "pre-tokenizer 'odd' is not known",
        ),
    ],
)
def test_a_gguf_tokenizer_of_an_unknown_kind_is_named(meta, words):
    with pytest.raises(ModelError, match=words):
        build_fast_tokenizer(meta, "file.gguf")


def test_a_folder_without_a_tokenizer_and_a_file_that_is_none_are_named(tmp_path):
    with pytest.raises(ModelError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)
    (tmp_path / "m.gguf").write_text("hello")
    with pytest.raises(ModelError, match="not a GGUF file"):
        load_tokenizer(tmp_path / "m.gguf")


def test_metaspace_folders_are_recognised_by_their_decoder(tmp_path):
    fast = FastTokenizer(BPE({"▁": 0, "a": 1, "<0xFF>": 2}, [], byte_fallback=True))
    fast.normalizer = normalizers.Replace(" ", "▁")
    fast.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert [tokenizer.token_bytes(i) for i in (0, 1, 2)] == [b" ", b"a", b"\xff"]
