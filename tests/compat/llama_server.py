"""llama.cpp's server over a tiny random model, which carries any chat template."""

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.support.ports import free_port

WIDTH, INNER = 64, 96
BINARY = Path(os.environ.get("KVLOOM_LLAMA_SERVER", "/nowhere"))


def make_model(path: Path) -> Path:
    """One random layer over a vocabulary of bytes; <BOS> and <EOS> are its special tokens."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = iter(range(256, 512))
    tokens = ["<BOS>", "<EOS>", *(chr(byte) if byte in kept else chr(next(moved)) for byte in range(256))]
    writer, dice = gguf.GGUFWriter(path, "llama"), np.random.default_rng(0)
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(WIDTH // 2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, *[1] * 256])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    square = [f"blk.0.attn_{part}" for part in ("q", "k", "v", "output")]
    shapes = dict.fromkeys(square, (WIDTH, WIDTH)) | dict.fromkeys(("token_embd", "output"), (len(tokens), WIDTH))
    shapes |= dict.fromkeys(("blk.0.ffn_gate", "blk.0.ffn_up"), (INNER, WIDTH)) | {"blk.0.ffn_down": (WIDTH, INNER)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", dice.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@contextmanager
def serving(model: Path, template: Path) -> Iterator[str]:
    """The address of a server with this template."""
    port = free_port()
    command = [str(BINARY), "-m", str(model), "--port", str(port), "--no-warmup", "-c", "512", "-np", "1"]
    process = subprocess.Popen(
        [*command, "--chat-template-file", str(template)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "listening on" in line:
                break
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate()


def prompt_of(address: str, messages: list[Any], tools: list[Any]) -> str | None:
    """The server's prompt; None where it refuses the conversation."""
    body = json.dumps({"messages": messages, **({"tools": tools} if tools else {})}).encode()
    request = urllib.request.Request(f"{address}/apply-template", body, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            prompt: str = json.load(answer)["prompt"]
    except urllib.error.HTTPError as error:
        error.close()
        return None
    return prompt
