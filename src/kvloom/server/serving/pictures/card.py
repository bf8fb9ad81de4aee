"""PictureCard: what is known of a text-to-image model before it is loaded; Wanted: what a request asks of one."""

from dataclasses import dataclass

from kvloom.images.messages import Format

MAX_STEPS = 200


@dataclass(frozen=True, slots=True)
class PictureCard:
    """One entry of ModelParam that makes pictures. `steps`, `guidance`: None = the pipeline's own."""

    name: str
    path: str
    device: str = "cpu"  # or "cuda", "cuda:1", "npu"
    cores: tuple[int, ...] = ()  # CPU cores; none = all
    dtype: str = "auto"
    time_limit_s: float | None = None  # of a request, waiting included
    max_pixels: int = 4 << 20  # all pictures of a request together
    steps: int | None = None
    guidance: float | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request asks for. Sizes in pixels; None = as the model has it."""

    prompt: str
    negative_prompt: str = ""
    size: tuple[int, int] | None = None  # width, height
    seeds: tuple[int, ...] = (0,)  # one for each picture
    steps: int | None = None
    effort: float = 1.0  # factor of the model's own number of steps, where `steps` is None
    guidance: float | None = None
    format: Format = "png"
    compression: int = 100
    num_partials: int = 0
