"""Pipeline: runs a text-to-image pipeline of diffusers."""

import inspect
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from PIL import Image

from kvloom.contract.errors import BadRequest, ModelError
from kvloom.images.files import check_pipeline, variant_of
from kvloom.images.messages import Paint, PipelineInfo, Setup

OnStep = Callable[[int, int, int], None]  # picture, step, steps in all; may raise Cancelled
OnPicture = Callable[[int, bytes, int | None], None]  # picture, file, number of an unfinished one
_SD3, _FLUX = "StableDiffusion3Pipeline", "FluxPipeline"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def open_pipeline(setup: Setup) -> "Pipeline":
    """Load a pipeline. Reads only safetensors, runs no code of the folder, uses no network. Raises ModelError."""
    path = Path(setup.path)
    name = check_pipeline(path)
    for library in (diffusers, transformers):
        library.logging.set_verbosity_error()  # warnings quote prompts
        library.logging.disable_progress_bar()
    best = "float32" if setup.device == "cpu" else "bfloat16"
    dtype = _DTYPES[best if setup.dtype == "auto" else setup.dtype]
    # by this class alone: other classes are not tried on the folder
    kind = getattr(diffusers, name)
    try:
        pipe = kind.from_pretrained(
            path, dtype=dtype, variant=variant_of(path), use_safetensors=True, local_files_only=True
        ).to(setup.device)
    except Exception as error:  # libraries may raise anything; their message is passed on
        told = str(error).strip().splitlines()
        raise ModelError(f"{path} cannot be loaded: {told[0] if told else type(error).__name__}") from error
    if setup.cores:
        torch.set_num_threads(len(setup.cores))
    pipe.set_progress_bar_config(disable=True)
    return Pipeline(pipe, name)


class Pipeline:
    """One picture at a time, in one thread."""

    def __init__(self, pipe: Any, name: str) -> None:
        self._pipe, self._name = pipe, name
        self._call = inspect.signature(pipe.__call__).parameters
        self._tokenizer, longest = _reader(pipe, name, self._call)
        width, height, multiple = _sizes(pipe, name)
        steps = self._call["num_inference_steps"].default
        self.info = PipelineInfo(name, width, height, multiple, steps, longest)

    def check(self, paint: Paint) -> int:
        """Number of tokens of the prompt. Raises BadRequest when a text is longer than the model reads."""
        if paint.negative_prompt and self._name == _FLUX:
            raise BadRequest("negative_prompt", "is nothing that this model reads")
        counts = []
        for field, text in (("prompt", paint.prompt), ("negative_prompt", paint.negative_prompt)):
            count = len(self._tokenizer(text).input_ids)
            if count > self.info.max_prompt_tokens:
                raise BadRequest(field, f"has {count} tokens; this model reads {self.info.max_prompt_tokens}")
            counts.append(count)
        return counts[0]

    def paint(self, paint: Paint, number: int, on_step: OnStep, on_picture: OnPicture) -> None:
        """Paint the picture of seed number `number`. Raises BadRequest, and what `on_step` raises."""
        shown = _partial_steps(paint.steps, paint.num_partials)

        def after_step(pipe: Any, index: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            on_step(number, index + 1, pipe.num_timesteps)
            if index + 1 in shown:
                sketch = self._decoded(tensors["latents"], paint)
                on_picture(number, _encoded(sketch, paint), shown.index(index + 1))
            return {}

        given: dict[str, Any] = {"negative_prompt": paint.negative_prompt or None}
        if paint.guidance is not None:
            given["guidance_scale"] = paint.guidance
        made = self._pipe(
            prompt=paint.prompt,
            width=paint.width,
            height=paint.height,
            num_inference_steps=paint.steps,
            generator=torch.Generator("cpu").manual_seed(paint.seeds[number]),
            callback_on_step_end=after_step,
            **given,
        )
        if any(getattr(made, "nsfw_content_detected", None) or ()):
            raise BadRequest("prompt", "the safety checker of the model refused the picture")
        on_picture(number, _encoded(made.images[0], paint), None)

    @torch.no_grad()
    def _decoded(self, latents: torch.Tensor, paint: Paint) -> Image.Image:
        """Decode the present latents into a picture, as the pipeline does at the end."""
        pipe, config = self._pipe, self._pipe.vae.config
        if self._name == _FLUX:
            latents = pipe._unpack_latents(latents, paint.height, paint.width, pipe.vae_scale_factor)
        latents = latents.to(next(pipe.vae.decoder.parameters()).dtype)
        mean, std = getattr(config, "latents_mean", None), getattr(config, "latents_std", None)
        if mean is not None and std is not None:
            mean, std = (torch.tensor(values).view(1, -1, 1, 1).to(latents) for values in (mean, std))
            latents = latents * std / config.scaling_factor + mean
        else:
            latents = latents / config.scaling_factor + (getattr(config, "shift_factor", None) or 0.0)
        image = pipe.vae.decode(latents, return_dict=False)[0]
        picture: Image.Image = pipe.image_processor.postprocess(image, output_type="pil")[0]
        return picture


def _partial_steps(steps: int, count: int) -> list[int]:
    """The steps after which unfinished pictures are sent: equally spaced, never the last; fewer if there are few
    steps.
    """
    return sorted({steps * (i + 1) // (count + 1) for i in range(count)} - {0, steps})


def _sizes(pipe: Any, name: str) -> tuple[int, int, int]:
    """Default width and height, and the number that both must be multiples of."""
    factor = pipe.vae_scale_factor
    if name == _FLUX:
        side = pipe.default_sample_size * factor
        return side, side, 2 * factor
    if name == _SD3:
        side = pipe.default_sample_size * factor
        return side, side, pipe.patch_size * factor
    sample = pipe.unet.config.sample_size
    height, width = (sample, sample) if isinstance(sample, int) else sample
    return width * factor, height * factor, max(8, factor)


def _reader(pipe: Any, name: str, call: Any) -> tuple[Any, int]:
    """The tokenizer with the longest input, and that length in tokens."""
    if name == _FLUX:
        return pipe.tokenizer_2, call["max_sequence_length"].default
    if name == _SD3 and pipe.text_encoder_3 is not None:
        return pipe.tokenizer_3, call["max_sequence_length"].default
    return pipe.tokenizer, pipe.tokenizer.model_max_length


def _encoded(picture: Image.Image, paint: Paint) -> bytes:
    file = io.BytesIO()
    more = {} if paint.format == "png" else {"quality": max(1, paint.compression)}  # 0 would be Pillow's default
    picture.save(file, paint.format.upper(), **more)
    return file.getvalue()
