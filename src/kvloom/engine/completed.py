"""The `COMPLETED REQ ID` line of the log, from which operators tune batch sizes (seed 001, 2.3.2, table 2-7)."""

import logging
from collections.abc import Sequence

from kvloom.engine.request import Delta, Request
from kvloom.engine.stats import Stats

log = logging.getLogger(__name__)


class CompletedLog:
    """One line a step that completes requests; costs nothing while the log's level leaves it out."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._tokens: dict[str, list[int]] = {}  # request id -> [prompt, output]

    def added(self, request: Request) -> None:
        if log.isEnabledFor(logging.INFO):
            self._tokens[request.id] = [len(request.prompt_ids), 0]

    def delivered(self, deltas: Sequence[Delta], stats: Stats) -> None:
        """`stats`: as of the step that the deltas come from."""
        if not self._tokens:
            return
        ended: list[tuple[str, int, int]] = []
        for delta in deltas:
            counts = self._tokens.get(delta.request_id)
            if counts is not None:
                counts[1] += len(delta.token_ids)
                if delta.finish_reason is not None:
                    del self._tokens[delta.request_id]
                    ended.append((delta.request_id, counts[0], counts[1]))
        if ended:
            log.info("%s", completed_line(ended, stats, self._block_size))


def completed_line(ended: Sequence[tuple[str, int, int]], stats: Stats, block_size: int) -> str:
    """Of the first request that ended: id, blocks, tokens, prompt tokens, output tokens; of the step: requests in the
    batch, blocks in use, requests that ended.

    `stats` are from after the step, without those that ended; the line counts them.
    """
    id, num_prompt, num_output = ended[0]
    blocks = [-(-(prompt + output) // block_size) for _, prompt, output in ended]
    columns = (
        id,
        blocks[0],
        num_prompt + num_output,
        num_prompt,
        num_output,
        stats.num_running + len(ended),
        stats.num_blocks - stats.num_free_blocks + sum(blocks),
        len(ended),
    )
    return "COMPLETED REQ ID: " + " , ".join(map(str, columns))
