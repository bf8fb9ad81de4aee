"""kv_transfer_params as in vLLM's server: one server computes a prompt, another one continues with its KV cache.

A router asks the first with do_remote_decode for one token, and hands what the answer says to the second. Between
kvloom's servers the blocks lie in an EMS pool, where the prompt itself finds them: `kv_pool` says in which.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvloom.contract.errors import BadRequest
from kvloom.contract.request import KvGiven, KvLocation
from kvloom.server.serving.generation import Answer, Generation
from kvloom.server.serving.service import GenerationService

FIELD = "kv_transfer_params"
Name = Annotated[str, Meta(min_length=1, max_length=256)]
_Id = Annotated[int, Meta(ge=0)]


class PoolBody(msgspec.Struct, kw_only=True):
    """Which blocks a server means, and where."""

    backend: Literal["ems"]
    pool: Annotated[str, Meta(max_length=256)]
    model: Name
    layout: Name
    block_size: Annotated[int, Meta(ge=1, le=2**20)]
    num_tokens: Annotated[int, Meta(ge=0)] = 0  # of the prompt, whose blocks are there


class KvTransferParams(msgspec.Struct, kw_only=True):
    """vLLM's names, of which only the first two ask for something here; connectors add others of their own."""

    do_remote_decode: bool | None = False  # compute the prompt, for another server
    do_remote_prefill: bool | None = False  # another server has
    remote_engine_id: Annotated[str, Meta(max_length=256)] | None = None
    remote_block_ids: list[_Id | list[_Id]] | None = None
    remote_host: Annotated[str, Meta(max_length=256)] | None = None
    remote_port: Annotated[int, Meta(ge=0, le=65535)] | None = None
    kv_pool: PoolBody | None = None

    def location(self, service: GenerationService) -> KvLocation | None:
        """Where the blocks lie already, when they do. Raises BadRequest naming the field."""
        if self.do_remote_decode and self.do_remote_prefill:
            raise BadRequest(FIELD, "do_remote_decode and do_remote_prefill cannot both be true")
        if (self.do_remote_decode or self.do_remote_prefill) and service.card.engine.kv_tier is None:
            raise BadRequest(FIELD, "needs a KV pool: give kvPoolConfig in the configuration of this server")
        if not self.do_remote_prefill:
            return None
        given = self.kv_pool
        if given is None:
            raise BadRequest(
                f"{FIELD}.kv_pool",
                "is required with do_remote_prefill: the prompt must have been computed by a kvloom server with "
                "do_remote_decode, whose answer has it",
            )
        return KvLocation(given.pool, given.model, given.layout, given.block_size)


def kv_params(given: KvGiven) -> dict[str, Any]:
    """kv_transfer_params of an answer, to be sent to the server that continues."""
    location = given.location
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": list(range(given.num_blocks)),
        "remote_engine_id": f"ems-{location.pool}",
        "remote_host": None,
        "remote_port": None,
        "kv_pool": {
            "backend": "ems",
            "pool": location.pool,
            "model": location.model,
            "layout": location.layout,
            "block_size": location.block_size,
            "num_tokens": given.num_blocks * location.block_size,
        },
    }


def given_together(generation: Generation, answers: Sequence[Answer]) -> KvGiven | None:
    """Of all prompts; choices of one prompt give the same blocks."""
    most: dict[int, KvGiven] = {}  # by the number of the prompt
    for choice, answer in enumerate(answers):
        prompt, given = choice // generation.best_of, answer.kv_given
        if given is not None and (prompt not in most or given.num_blocks > most[prompt].num_blocks):
            most[prompt] = given
    if not most:
        return None
    return KvGiven(next(iter(most.values())).location, sum(given.num_blocks for given in most.values()))
