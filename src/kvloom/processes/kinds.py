"""The kinds of child processes that speak to their parent through a socket: a row each."""

import sys
from dataclasses import replace
from socket import SOCK_SEQPACKET, SOCK_STREAM

from kvloom.processes.child import Kind

_MODEL = "the model process"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _python(module: str) -> tuple[str, ...]:
    return sys.executable, "-m", module


RANK = Kind(_MODEL, _python("kvloom.rank.main"))
VLLM = Kind(_MODEL, _python("kvloom.vllm.main"), leads_group=True, exit_s=3.0)
PAINTER = Kind(_MODEL, _python("kvloom.images.main"), silence_s=120.0, environ=_OFFLINE)
PARSERS = Kind(
    "the template of parsers",
    _python("kvloom.server.run.parse_process"),
    leads_group=True,
    socket=SOCK_SEQPACKET,
    environ={"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"},
)
PARSER = replace(PARSERS, people="the process that reads large requests", silence_s=60.0, socket=SOCK_STREAM)
WORKER = Kind(
    _MODEL,
    _python("kvloom.gewu.worker.main"),
    leads_group=True,
    imports="kvloom.gewu.worker.main kvloom.gewu.worker.fit kvloom.rank.fake",
)
PROBER = Kind(
    "the process that looks at models",
    _python("kvloom.gewu.prober.main"),
    leads_group=True,
    silence_s=3.0,
    socket=SOCK_SEQPACKET,
)
