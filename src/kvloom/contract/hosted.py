"""Messages to and from an engine that schedules by itself, in another process (MessagePack arrays).

Whole requests are sent there, tokens come back. Adapters are loaded with the messages for ranks (messages.py).
"""

import msgspec

from kvloom.contract.config import EngineConfig
from kvloom.contract.images import Sight
from kvloom.contract.lifecycle import Failed, Loading, Ready
from kvloom.contract.messages import (
    AdapterLoaded,
    AdapterRefused,
    LoadAdapter,
    Logprob,
    RankInfo,
    UnloadAdapter,
)
from kvloom.contract.sampling import SamplingParams


class HostSetup(msgspec.Struct, array_like=True):
    """The first message to a host."""

    config: EngineConfig
    eos_ids: list[int]


class Start(msgspec.Struct, array_like=True, tag="start"):
    """A request to run. The host ends it at one of `eos_ids` if the request wants that; stop strings are found by the
    sender.

    `max_tokens` is what `params` and the context leave; 0 = only data about the prompt is wanted.
    """

    id: int
    prompt_ids: list[int]
    params: SamplingParams
    seed: int
    max_tokens: int
    priority: int = 0  # as in Request
    cache_salt: str = ""
    adapter: int = 0
    pooling: str = ""
    sight: Sight | None = None  # the images in prompt_ids; sent with every request
    is_look: bool = False  # only the prompt as the model reads it is wanted


class Abort(msgspec.Struct, array_like=True, tag="abort"):
    """End a request. Not answered; unknown ids are ignored."""

    id: int


class ResetCache(msgspec.Struct, array_like=True, tag="reset"):
    """Forget cached prefixes; with `preempts` running requests are computed again too. Answered by WasReset."""

    preempts: bool


class Brought(msgspec.Struct, array_like=True):
    """What a request got since its last message: tokens in order, with log-probabilities if asked for.

    `error` ends it too; with a `field` the request itself is at fault.
    """

    id: int
    token_ids: list[int] = []
    logprobs: list[Logprob] = []  # one a token, or empty
    prompt_logprobs: list[Logprob] = []  # of the prompt's tokens from the second, or scored_from, on; sent once
    num_cached: int = 0  # prompt tokens found in the prefix cache
    finish: str = ""  # "stop", "length": the host has ended it
    embedding: bytes = b""  # float32, not normalised
    prompt_ids: list[int] = []  # result of a look
    error: str = ""
    field: str = ""


class Answers(msgspec.Struct, array_like=True, tag="answers"):
    """What the requests of one step got."""

    items: list[Brought]


class WasReset(msgspec.Struct, array_like=True, tag="was_reset"):
    """Answers ResetCache."""


class Figures(msgspec.Struct, array_like=True, tag="figures"):
    """Figures of the host, sent unasked; totals since it started."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0  # share of its blocks, 0 to 1
    total_steps: int = 0
    total_preemptions: int = 0
    metrics: str | None = None  # Prometheus text format; None = unchanged


HostOrder = Start | Abort | ResetCache | LoadAdapter | UnloadAdapter
HostReport = Loading | Ready[RankInfo] | Failed | Answers | WasReset | Figures | AdapterLoaded | AdapterRefused
