"""Formatting: large answers are encoded as JSON on a thread of their own, so that streams go on meanwhile.

The interpreter switches threads every few milliseconds, so what would block the loop for a second only takes a little
longer. One call of the encoder cannot be interrupted, so it encodes a choice at a time.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_ITEMS = 1000  # tokens, log-probabilities or numbers: a few milliseconds

_thread = ThreadPoolExecutor(1, "formatting")  # more threads would compete with the loop

Formatted = TypeVar("Formatted")


async def formatted(num_items: int, make: Callable[[], Formatted]) -> Formatted:
    """The result of `make`, which formats about `num_items` items. It must not touch anything that the loop changes."""
    if num_items <= INLINE_ITEMS:
        return make()
    return await asyncio.get_running_loop().run_in_executor(_thread, make)
