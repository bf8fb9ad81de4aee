"""Checks that models answer, by a real inference of one token, or an embedding of one."""

import asyncio
from collections.abc import Iterable
from contextlib import aclosing

from kvloom.contract.errors import ServingError
from kvloom.contract.request import Request
from kvloom.contract.sampling import SamplingParams
from kvloom.server.serving.service import GenerationService

_POLL_S = 0.05


async def probe(services: Iterable[GenerationService], id: str, limit_s: int) -> None:
    """Probe each model, all within `limit_s`. Raises ServingError."""
    try:
        async with asyncio.timeout(limit_s):
            for service in services:
                await _probe(service, id)
    except TimeoutError:
        raise ServingError(f"the model gave no token within {limit_s} s") from None


async def _probe(service: GenerationService, id: str) -> None:
    """One token, ahead of every queue, or a step of a running request. Raises ServingError."""
    steps = service.engine.stats().total_steps

    async def ask() -> None:
        prompt = tuple(service.tokenizer.encode("Hello")[:1])
        request = Request(f"probe-{id}", prompt, SamplingParams(temperature=0, max_tokens=1))
        if "generation" in service.engine.info.lacks:
            request = Request(request.id, prompt, SamplingParams(max_tokens=0), pooling=service.engine.info.pooling)
        async with aclosing(service.engine.stream(request)) as deltas:
            async for _ in deltas:
                pass

    probe = asyncio.create_task(ask())
    try:
        while not probe.done():
            await asyncio.wait({probe}, timeout=_POLL_S)
            stats = service.engine.stats()
            if stats.num_running > 1 and stats.total_steps > steps + 1:
                return
        probe.result()
    finally:
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
