"""Files of blocks of few bits with bytes that nobody wrote: what is read are finite numbers, or it is refused."""

from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.checkpoints.checkpoint import open_checkpoint
from kvloom.checkpoints.gguf_types import GGUF_TYPES
from kvloom.checkpoints.quantized.numbers import LEVELS
from kvloom.checkpoints.quantized.small_blocks import SMALL_KINDS
from kvloom.contract.errors import ModelError
from tests.engine.kernels.models import random_blocks
from tests.support.models.checkpoints import tiny_model

from .test_gguf import write

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1}
NUMBERS = {kind.name.lower(): number for number, kind in GGUF_TYPES.items()}
KINDS = [kind for kind in SMALL_KINDS if kind.upper() in gguf.GGMLQuantizationType.__members__]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A model whose matrices are of every type, one after the other."""
    folder = tmp_path_factory.mktemp("blocks")
    plain = write(folder / "plain.gguf", tiny_model("llama", num_hidden_layers=2, **SIZES), "llama")
    reader, writer = gguf.GGUFReader(plain), gguf.GGUFWriter(folder / "m.gguf", "llama")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, field.contents(), field.types[0])
    for index, tensor in enumerate(reader.tensors):
        kind, shape = KINDS[index % len(KINDS)], tuple(int(size) for size in tensor.shape[::-1])
        if len(shape) == 1:
            writer.add_tensor(tensor.name, np.array(tensor.data))
        else:
            blocks = random_blocks(tensor.name, shape, kind).data
            writer.add_tensor(tensor.name, blocks, raw_dtype=gguf.GGMLQuantizationType(NUMBERS[kind]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (folder / "m.gguf").read_bytes()


def read_all(path: Path) -> None:
    """Raises ModelError; fails for a value that is no finite number."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint.weights.names():
        tensor = checkpoint.weights.tensor(name)
        if tensor.form:
            for _, numbers in tensor.number_pieces():
                assert numbers.values.max() < len(LEVELS[tensor.form])
                assert np.isfinite(numbers.scales).all()
        assert np.isfinite(tensor.float32()).all()


@settings(max_examples=25)
@given(st.binary(min_size=1, max_size=48), st.floats(0, 1), st.booleans())
def test_a_file_with_other_bytes_is_read_or_refused(whole, tmp_path_factory, noise, place, is_header):
    data = bytearray(whole)
    at = int(place * (2000 if is_header else len(data) - len(noise)))
    data[at : at + len(noise)] = noise
    path = tmp_path_factory.mktemp("noise") / "m.gguf"
    path.write_bytes(data)
    with suppress(ModelError):
        read_all(path)


def test_the_file_itself_is_read(whole, tmp_path):
    (tmp_path / "m.gguf").write_bytes(whole)
    read_all(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes(whole[:-100])
    with pytest.raises(ModelError, match="cut short"):
        read_all(tmp_path / "m.gguf")


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_fills_no_block_is_refused(whole, kind, tmp_path):
    """The type of a matrix of 256 columns said to be one of 96."""
    name, columns = b"blk.0.attn_q.weight", np.uint64(256).tobytes()
    at = whole.index(name) + len(name) + 4
    assert whole[at : at + 8] == columns
    number = NUMBERS[kind].to_bytes(4, "little")
    data = whole[:at] + np.uint64(96).tobytes() + whole[at + 8 : at + 16] + number + whole[at + 20 :]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(ModelError, match=r"tensor blk\.0\.attn_q\.weight of shape \[\d+, 96\] does not fill blocks"):
        open_checkpoint(tmp_path / "m.gguf")
