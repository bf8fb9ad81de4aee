"""The table of sampling parameters in docs/server.md, made of their rows and of the dialects' bodies."""

import re
from collections.abc import Iterator
from pathlib import Path

from kvloom.contract.sampling import OFF, ROWS, Row
from kvloom.server.dialects.anthropic.bodies import MessagesBody
from kvloom.server.dialects.ollama.options import NAMED
from kvloom.server.dialects.openai.bodies import SamplingBody
from kvloom.server.dialects.parameters import Parameters
from kvloom.server.dialects.responses.bodies import ResponsesBody
from kvloom.server.dialects.sampling import Named
from kvloom.server.dialects.vllm.generate import PromptBody

PAGE = Path(__file__).parents[2] / "docs" / "server.md"
BODIES = {  # heading -> parameters of the bodies below it
    "chat, completions": Named(SamplingBody),
    "responses": Named(ResponsesBody),
    "messages": Named(MessagesBody),
    "Ollama": NAMED,
    "TGI, Triton, native": Named(Parameters),
    "vLLM's `/generate`": Named(PromptBody),
}
_TABLE = re.compile(r"(?<=<!-- sampling parameters -->\n).*?(?=<!-- end -->)", re.DOTALL)


def table() -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in _rows())


def _rows() -> Iterator[list[str]]:
    yield ["parameter", "range", "off", *BODIES]
    yield ["---"] * (3 + len(BODIES))
    for name, row in ROWS.items():
        fields = [named.names.get(name) for named in BODIES.values()]
        if any(fields):
            cells = ["" if field is None else "yes" if field == name else f"`{field}`" for field in fields]
            yield [f"`{name}`", _range(row, OFF[name]), _shown(OFF[name]), *cells]


def _range(row: Row, off: object) -> str:
    if row.low is None or row.high is None:
        return "true, false" if isinstance(off, bool) else "token ids"
    whole = {2**31 - 1: "2^31 - 1", 2**64 - 1: "2^64 - 1", -(2**63): "-2^63"}
    low, high = (whole.get(int(bound), f"{bound:g}") for bound in (row.low, row.high))
    return f"above {low}, to {high}" if row.opens_low else f"{low} to {high}"


def _shown(off: object) -> str:
    if isinstance(off, bool):
        return str(off).lower()
    return f"{off:g}" if isinstance(off, int | float) else "none"


def written() -> str:
    """The table as the page has it."""
    found = _TABLE.search(PAGE.read_text())
    assert found is not None
    return found[0]


def write() -> None:
    """Put the table into the page."""
    PAGE.write_text(_TABLE.sub(lambda _: table(), PAGE.read_text(), count=1))
