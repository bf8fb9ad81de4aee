"""The kinds of child processes: a row each.

Two children have no row: their parents are programs of others, in which kvloom is no package. The Engine API's host is
started by `engine_api/cpp/process.cpp`, and an app's own EMS agent by `ems/private_agent.py`.
"""

import sys
from dataclasses import replace
from socket import SOCK_SEQPACKET, SOCK_STREAM

from kvloom.processes.child import Kind

_MODEL = "the model process"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def _python(*words: str) -> tuple[str, ...]:
    return sys.executable, "-m", *words


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
AGENT = Kind(
    "the EMS agent",
    _python("kvloom", "pool", "agent", "--ends-with-stdin"),
    exit_s=10.0,
    silence_s=30.0,
    is_quiet=True,
)
