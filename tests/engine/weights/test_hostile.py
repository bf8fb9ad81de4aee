"""Model files that no converter would write: each is refused quickly and in one sentence."""

import itertools
import json
import math
import os
import re
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.fingerprint import fingerprint
from kvloom.checkpoints.metadata import read_header, read_shape
from kvloom.contract.errors import ModelError
from kvloom.engine.text.tokenizer import load_tokenizer
from kvloom.rank.kernels.cpu import CpuBackend
from tests.engine.weights.test_gguf import write
from tests.support.models.checkpoints import save, tiny_model
from tests.support.models.vocabularies import fast

U8, U32, STRING, ARRAY = 0, 4, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf_file(path: Path, *pairs: bytes, num_pairs: int | None = None, num_tensors: int = 0) -> Path:
    arch = text("general.architecture") + struct.pack("<I", STRING) + text("llama")
    head = struct.pack("<IQQ", 3, num_tensors, 1 + len(pairs) if num_pairs is None else num_pairs)
    path.write_bytes(b"GGUF" + head + arch + b"".join(pairs))
    return path


def array(key: str, kind: int, count: int, items: bytes = b"") -> bytes:
    return text(key) + struct.pack("<IIQ", ARRAY, kind, count) + items


NESTED = struct.pack("<IQ", ARRAY, 1) * 5000
HOSTILE = {
    "arrays in arrays": [array("a", ARRAY, 1, NESTED)],
    "an array longer than the file": [array("a", U8, 1 << 40)],
    "a string longer than the file": [text("a") + struct.pack("<IQ", STRING, 1 << 62)],
    "an unknown type": [text("a") + struct.pack("<I", 77)],
    "an array of an unknown type": [array("a", 77, 3)],
    "an alignment of zero": [text("general.alignment") + struct.pack("<II", U32, 0)],
    "an alignment that is a string": [text("general.alignment") + struct.pack("<I", STRING) + text("x")],
    "text that is none": [struct.pack("<Q", 2) + b"\xff\xfe" + struct.pack("<II", U32, 0)],
}


@pytest.mark.parametrize("pairs", HOSTILE.values(), ids=HOSTILE)
def test_a_header_that_cannot_be_is_refused(pairs, tmp_path):
    with pytest.raises(ModelError, match=r"damaged|alignment"):
        read_header(gguf_file(tmp_path / "m.gguf", *pairs))


@pytest.mark.parametrize("counts", [{"num_pairs": 1 << 60}, {"num_tensors": 1 << 60}])
def test_counts_without_end_are_refused(counts, tmp_path):
    with pytest.raises(ModelError, match="more than"):
        read_header(gguf_file(tmp_path / "m.gguf", **counts))


@pytest.mark.parametrize("kind", [U8, STRING])
def test_a_sparse_file_builds_nothing(kind, tmp_path):
    path = gguf_file(tmp_path / "m.gguf", array("a", kind, 40 << 20))
    os.truncate(path, 1 << 30)
    with pytest.raises(ModelError, match="more than 8388608 items"):
        read_header(path)
    with pytest.raises(ModelError, match="more than 8388608 items"):
        read_shape(path)


WHOLE = b"".join([array("x", U32, 3, b"\0" * 12), text("llama.block_count") + struct.pack("<II", U32, 2)])


@given(st.binary(max_size=40), st.integers(0, 120), st.integers(0, 40))
def test_whatever_bytes_are_written_over_a_header_it_is_read_or_refused(tmp_path_factory, noise, start, cut):
    path = gguf_file(tmp_path_factory.mktemp("gguf") / "m.gguf", WHOLE, num_pairs=3, num_tensors=0)
    data = bytearray(path.read_bytes())
    data[start : start + len(noise)] = noise
    path.write_bytes(data[: len(data) - cut])
    for read in (read_header, read_shape, open_checkpoint, load_tokenizer):
        with suppress(ModelError):
            read(path)


BASE = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
BASE |= {"intermediate_size": 96, "vocab_size": 128}
BAD_CONFIGS: dict[str, Any] = {
    "2,000 brackets": "[" * 2000,
    "100,000 braces": '{"a":' * 100_000,
    "no object": "[]",
    "a number of 400 digits": json.dumps({**BASE, "hidden_size": 10**399}),
    "a float of 400 digits": json.dumps({**BASE, "rms_norm_eps": 10**399}),
    "theta of 400 digits": json.dumps({**BASE, "rope_theta": 10**399}),
    "a billion layers": json.dumps({**BASE, "num_hidden_layers": 10**9}),
    "a head of a billion": json.dumps({**BASE, "head_dim": 10**9}),
    "a number that kernels do not count": json.dumps({**BASE, "intermediate_size": 1 << 31}),
    "a list as a number": json.dumps({**BASE, "rms_norm_eps": [1]}),
    "a list as scaling": json.dumps({**BASE, "rope_scaling": [1]}),
    "a word as a factor": json.dumps({**BASE, "rope_scaling": {"rope_type": "linear", "factor": "x"}}),
    "a factor of zero": json.dumps({**BASE, "rope_scaling": {"rope_type": "linear", "factor": 0}}),
    "types that are objects": json.dumps({**BASE, "sliding_window": 3, "use_sliding_window": 1, "layer_types": [{}]}),
    "an object as a name": json.dumps({**BASE, "architectures": [{}]}),
    "bytes that are no text": "\ud800",
}


@pytest.mark.parametrize("config", BAD_CONFIGS.values(), ids=BAD_CONFIGS)
def test_a_configuration_that_cannot_be_is_refused(config, tmp_path):
    (tmp_path / "config.json").write_bytes(config.encode("utf-8", "surrogatepass"))
    (tmp_path / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
        open_checkpoint(tmp_path)
    with pytest.raises(ModelError, match=re.escape(str(tmp_path))):
        load_tokenizer(tmp_path)


def test_what_is_wrong_is_quoted_in_part(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**BASE, "architectures": ["x" * 100_000]}))
    with pytest.raises(ModelError) as error:
        open_checkpoint(tmp_path)
    folder = save(tiny_model("llama"), tmp_path / "model", max_shard_size="1GB")
    data = (folder / "model.safetensors").read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    for wrong in ("X" * 100_000, ["X" * 100_000]):
        header["model.norm.weight"]["dtype"] = wrong
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[-1_000_000:])
        with pytest.raises(ModelError) as other:
            open_checkpoint(folder)
        assert max(len(str(error.value)), len(str(other.value))) < 2000


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["embed_tokens", "norm", "layers.1.self_attn.k_proj", "layers.0.mlp.down_proj"])
@pytest.mark.parametrize("is_gguf", [False, True], ids=["folder", "gguf"])
def test_a_weight_that_is_no_number_is_named_with_its_file(is_gguf, name, bad, tmp_path):
    model = tiny_model("llama", head_dim=32)
    model.get_parameter(f"model.{name}.weight").data.view(-1)[-1] = bad
    path = write(tmp_path / "m.gguf", model, "llama") if is_gguf else save(model, tmp_path / "model")
    checkpoint = open_checkpoint(path)
    with pytest.raises(ModelError, match=rf"{re.escape(str(path))}: tensor [\w.]+: a weight is no finite number"):
        CpuBackend(checkpoint.spec, checkpoint.weights, 4)


KINDS = ("pipe", "device", "folder", "loop", "other rights")
NEEDED = ("config.json", "model.safetensors", "tokenizer.json")
MAY_BE_ABSENT = "generation_config.json"


@pytest.mark.parametrize(
    ("name", "kind"),
    [*itertools.product(NEEDED, KINDS), *((MAY_BE_ABSENT, kind) for kind in KINDS if kind != "loop")],
)
def test_what_is_no_plain_file_is_not_waited_for(name, kind, tmp_path):
    folder = save(tiny_model("llama"), tmp_path / "model", max_shard_size="1GB")
    (folder / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "folder":
        (folder / name).mkdir()
    elif kind == "other rights":
        (folder / name).symlink_to("/proc/self/mem")
    else:
        (folder / name).symlink_to({"device": "/dev/zero", "loop": folder / name}[kind])
    if name == MAY_BE_ABSENT:
        fast("Gemma").save(str(folder / "tokenizer.json"))
    read = load_tokenizer if name in ("tokenizer.json", MAY_BE_ABSENT) else open_checkpoint
    with pytest.raises(ModelError, match=re.escape(str(folder if name == "tokenizer.json" else folder / name))):
        read(folder)


def test_a_loop_is_as_good_as_absent_where_a_file_may_be(tmp_path):
    folder = save(tiny_model("llama"), tmp_path / "model", max_shard_size="1GB")
    (folder / MAY_BE_ABSENT).unlink()
    absent = open_checkpoint(folder)
    (folder / MAY_BE_ABSENT).symlink_to(folder / MAY_BE_ABSENT)
    assert open_checkpoint(folder).spec == absent.spec


def test_a_folder_that_holds_one_gguf_file_is_that_model(tmp_path):
    (tmp_path / "model").mkdir()
    path = write(tmp_path / "model" / "any.gguf", tiny_model("llama"), "llama")
    assert open_checkpoint(path.parent).spec == open_checkpoint(path).spec
    assert fingerprint(path.parent) == fingerprint(path)
    (path.parent / "mmproj-any.gguf").write_bytes(b"x")
    assert open_checkpoint(path.parent).path == path
    (path.parent / "second.gguf").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"holds 2 models \(any\.gguf, second\.gguf\), 1 projector"):
        open_checkpoint(path.parent)


@pytest.mark.parametrize("method", ["hqq", "nvfp4", "quanto"])
def test_folders_quantised_otherwise_are_refused_by_name(method, tmp_path):
    folder = save(tiny_model("llama"), tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": method}}))
    with pytest.raises(ModelError, match=f"weights quantised by '{method}' are not supported"):
        open_checkpoint(folder)
