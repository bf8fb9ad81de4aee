"""Messages between a server and the process of a text-to-image model, as MessagePack arrays in frames."""

from typing import Literal, TypeAlias

import msgspec

from kvloom.contract.lifecycle import Failed, Pong, Ready

Format: TypeAlias = Literal["png", "jpeg", "webp"]


class Setup(msgspec.Struct, array_like=True, frozen=True, tag="setup"):
    """The first order. `dtype`: of the weights, in the configuration's terms; auto = what the device computes best."""

    path: str
    device: str = "cpu"
    dtype: str = "auto"
    cores: list[int] = []  # CPU cores that it may run on; empty = all


class Paint(msgspec.Struct, array_like=True, frozen=True, tag="paint"):
    """One picture for each seed, one after the other, so that each seed gives the same picture as by itself.

    `steps` and `guidance`: None = the pipeline's own. For each picture `num_partials` unfinished ones are sent first.
    """

    id: int
    prompt: str
    negative_prompt: str
    width: int  # pixels
    height: int
    seeds: list[int]
    steps: int
    guidance: float | None = None
    format: Format = "png"
    compression: int = 100  # quality of jpeg and webp, 0 to 100
    num_partials: int = 0


class Cancel(msgspec.Struct, array_like=True, frozen=True, tag="cancel"):
    """End the order after the current denoising step. An order that has ended already is ignored."""

    id: int


class Cancelled(Exception):
    """An order was cancelled while it ran."""


Order: TypeAlias = Paint | Cancel


class PipelineInfo(msgspec.Struct, array_like=True, frozen=True):
    """Properties of a loaded pipeline. Sizes in pixels."""

    kind: str  # the class named in model_index.json
    width: int  # default size of a picture
    height: int
    multiple: int  # widths and heights must be multiples of it
    steps: int  # default number of denoising steps
    max_prompt_tokens: int


class Progress(msgspec.Struct, array_like=True, frozen=True, tag="progress"):
    """`step` of the `num_steps` denoising steps of a picture is done."""

    id: int
    picture: int
    step: int
    num_steps: int


class Picture(msgspec.Struct, array_like=True, frozen=True, tag="picture"):
    """An image file in the format asked for. `partial`: number of an unfinished picture; None = finished."""

    id: int
    picture: int
    data: bytes
    partial: int | None = None
    num_prompt_tokens: int = 0


class Ended(msgspec.Struct, array_like=True, frozen=True, tag="ended"):
    """The last message of an order. `error`: why it failed; `field`: the field at fault, "" if none is."""

    id: int
    num_prompt_tokens: int = 0
    error: str = ""
    field: str = ""


SIGN_S = 1.0  # seconds between two Pongs, from the start on, also while a pipeline is loaded and during a step
Report: TypeAlias = Progress | Picture | Ended
Sent: TypeAlias = Report | Pong
Loaded: TypeAlias = Ready[PipelineInfo] | Failed | Pong
