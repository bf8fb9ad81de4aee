"""What a server and the process of a text-to-image model say to each other, as MessagePack in frames."""

from typing import Literal, TypeAlias

import msgspec

Format: TypeAlias = Literal["png", "jpeg", "webp"]


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first order. `dtype`: of the weights, as the configuration names it; auto = what the device computes best."""

    path: str
    device: str = "cpu"
    dtype: str = "auto"
    cores: list[int] = []  # that it may run on; none = all


class Paint(msgspec.Struct, frozen=True, tag=True):
    """One picture for each seed, one after another, so that each is the one that its seed gives alone.

    `steps` and `guidance`: None = the pipeline's own. `num_partials` unfinished pictures are shown on the way to each.
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


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End the order after the current denoising step. An order that has ended already is ignored."""

    id: int


Order: TypeAlias = Paint | Cancel


class PipelineInfo(msgspec.Struct, frozen=True):
    """What a loaded pipeline is like. Sizes in pixels."""

    kind: str  # the class, as model_index.json names it
    width: int  # default size of a picture
    height: int
    multiple: int  # of which widths and heights are multiples
    steps: int  # default number of denoising steps
    max_prompt_tokens: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The pipeline is loaded."""

    info: PipelineInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The pipeline cannot be loaded; the process ends."""

    error: str


class Progress(msgspec.Struct, frozen=True, tag=True):
    """`step` of `num_steps` of a picture is done."""

    id: int
    picture: int
    step: int
    num_steps: int


class Picture(msgspec.Struct, frozen=True, tag=True):
    """A file of the format asked for. `partial`: the number of an unfinished one; None = it is done."""

    id: int
    picture: int
    data: bytes
    partial: int | None = None
    num_prompt_tokens: int = 0


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Nothing follows of this order. `error`: why it failed; `field`: what of it is to blame, "" for nothing of it."""

    id: int
    num_prompt_tokens: int = 0
    error: str = ""
    field: str = ""


Report: TypeAlias = Progress | Picture | Ended
Loaded: TypeAlias = Ready | Failed
