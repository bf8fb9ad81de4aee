"""Formatting: large answers are written as JSON on a thread of their own, so that streams go on meanwhile.

The interpreter changes between threads every few milliseconds; what would take the loop a second takes a little longer
there. One call of the encoder keeps the interpreter to itself: it is given a choice at a time.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_ITEMS = 1000  # tokens, log-probabilities or numbers: a few milliseconds

_thread = ThreadPoolExecutor(1, "formatting")  # more of them would take turns with the loop, too

Formatted = TypeVar("Formatted")


async def formatted(num_items: int, make: Callable[[], Formatted]) -> Formatted:
    """What `make` returns, which is about so many items long. It touches nothing that the loop changes."""
    if num_items <= INLINE_ITEMS:
        return make()
    return await asyncio.get_running_loop().run_in_executor(_thread, make)
