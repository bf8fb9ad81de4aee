"""The `COMPLETED REQ ID` line of the log, from which operators tune batch sizes (spec table 2-7)."""

import logging
import re
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from kvloom.contract.request import Delta, Request

_SERIAL = re.compile(r"-\d+-\d+\Z")  # of a request and of its choice

log = logging.getLogger(__name__)


class StepSize(NamedTuple):
    """Size of one step: its requests, and the blocks that all running requests held at its end."""

    num_seqs: int = 0
    num_blocks: int = 0


class CompletedLog:
    """Logs one line for each step that completes requests; does nothing while the log level leaves it out."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tokens: dict[str, deque[list[int]]] = {}  # id -> [prompt, output] of its requests, oldest first

    def added(self, request: Request) -> None:
        if log.isEnabledFor(logging.INFO):
            self._tokens.setdefault(request.id, deque()).append([len(request.prompt_ids), 0])

    def delivered(self, deltas: Sequence[Delta], step: StepSize) -> None:
        """Log the requests that `deltas` end. `step` is the step that they come from."""
        if not self._tokens:
            return
        ended: list[tuple[str, int, int]] = []
        for delta in deltas:
            line = self._tokens.get(delta.request_id)
            if line is not None:
                line[0][1] += len(delta.token_ids)
                if delta.finish_reason is not None:
                    num_prompt, num_output = line.popleft()
                    ended.append((delta.request_id, num_prompt, num_output))
                    if not line:
                        del self._tokens[delta.request_id]
        if ended:
            log.info("%s", completed_line(ended, step, self._block_size))


def _shown(id: str) -> str:
    """The id that the caller knows: without what makes it unique in the engine (server/serving/service.py), or tells
    the Engine API's numbers from its texts.
    """
    kind, colon, name = id.partition(":")
    if colon and kind in ("UINT64", "STRING"):
        return name
    return _SERIAL.sub("", id)


def completed_line(ended: Sequence[tuple[str, int, int]], step: StepSize, block_size: int) -> str:
    """The line's text. Of the first request that ended: id, blocks, tokens, prompt tokens, output tokens. Of the step:
    requests in the batch, blocks in use, requests that ended.

    The last token occupies no block: it was sampled, but no step computed its keys and values.
    """
    id, num_prompt, num_output = ended[0]
    num_held = num_prompt + max(0, num_output - 1)
    columns = (
        _shown(id),
        -(-num_held // block_size),
        num_prompt + num_output,
        num_prompt,
        num_output,
        step.num_seqs,
        step.num_blocks,
        len(ended),
    )
    return "COMPLETED REQ ID: " + " , ".join(map(str, columns))
