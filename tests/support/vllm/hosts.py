"""Test servers over vLLM itself: processes with vLLM, started once and lent to one server after another.

KVLOOM_TEST_ENGINE=vllm enables it; KVLOOM_VLLM_PYTHON names the interpreter that has vLLM (`make compat-vllm`).
"""

import atexit
import itertools
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from msgspec import structs

from kvloom.contract.config import EngineConfig
from kvloom.contract.hosted import Abort, HostOrder, Start
from kvloom.contract.tokenizer import Tokenizer
from kvloom.engine.hosted.engine import HostedEngine
from kvloom.engine.hosted.host import Host
from kvloom.processes import kinds
from kvloom.rank.byte_tokenizer import EOS_ID
from tests.support.kept import kept
from tests.support.models import byte_folder, chained_llama
from tests.support.vllm.serving import ENVIRONMENT, PYTHON, SOURCE

_VARIABLES = (f"{name}={value}" for name, value in {**ENVIRONMENT, "PYTHONPATH": SOURCE}.items())
_KIND = replace(kinds.VLLM, command=("env", *_VARIABLES, PYTHON, "-m", "kvloom.vllm.main"))
_sequences = itertools.count(0, 1_000_000)  # so that a late answer is not taken for one of the next server
_idle: dict[str, list[Host]] = {}  # by their options


def chained_model() -> Path:
    """The folder of the chained model."""
    sources = (Path(str(module.__file__)).read_bytes() for module in (chained_llama, byte_folder))
    return kept([*sources, version("transformers").encode()], "model", chained_llama.make_chained_llama)


class LentHost:
    """A Host that belongs to one server until `close`."""

    def __init__(self, tokenizer: Tokenizer, options: Mapping[str, object]) -> None:
        """`options`: of vLLM, besides the common ones."""
        self._idle = _idle.setdefault(repr(sorted(options.items())), [])
        self._host = self._idle.pop() if self._idle else _start(options)
        self._is_endless = not tokenizer.eos_ids
        self._started: list[int] = []
        self._host.expect_from_now()
        self._host.reset_cache(True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._host, name)

    def send(self, order: HostOrder) -> None:
        if isinstance(order, Start):
            self._started.append(order.id)
            if self._is_endless:
                order = structs.replace(order, params=replace(order.params, ignore_eos=True))
        self._host.send(order)

    def close(self) -> None:
        """Returns the host; it computes nothing more for this server."""
        if self._host not in self._idle:
            for id in self._started:
                self._host.send(Abort(id))
            self._idle.append(self._host)


def vllm_engine(config: EngineConfig, tokenizer: Tokenizer) -> tuple[HostedEngine, LentHost]:
    """An engine over one of the processes."""
    host = LentHost(tokenizer, config.plugin_options)
    engine = HostedEngine(config, host, tokenizer)  # type: ignore[arg-type]
    engine._next_id = next(_sequences)
    return engine, host


def _start(options: Mapping[str, object]) -> Host:
    more = {"enforce_eager": True, "dtype": "float32", "block_size": 32, "enable_lora": True, **options}
    config = EngineConfig(
        str(chained_model()), backend="vllm", max_seq_len=chained_llama.MAX_LEN, max_batch=32, plugin_options=more
    )
    host = Host(_KIND, config, lambda: [EOS_ID])
    atexit.register(host.close)
    return host
