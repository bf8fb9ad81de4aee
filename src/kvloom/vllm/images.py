"""Images as vLLM takes them: a file's head is read before anything is decoded. In the process with vLLM in it."""

import asyncio
import io
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from PIL import Image as Pillow

from kvloom.contract.errors import BadRequest
from kvloom.contract.hosted import Start
from kvloom.contract.images import Image

FORMATS = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp", "GIF": "image/gif"}
MAX_PIXELS = 50_000_000  # of one image: 150 MB once it is decoded
_AT_ONCE = 2  # requests whose images are decoded
MAX_ALL_PIXELS = 100_000_000  # of those of a request, which are all decoded at once


def check_image(image: Image) -> int:
    """Read the head of its file. Returns how many pixels it has. Raises BadRequest naming the image."""
    try:
        with Pillow.open(io.BytesIO(image.data), formats=tuple(FORMATS)) as found:
            kind, (width, height), num_frames = str(found.format), found.size, getattr(found, "n_frames", 1)
    except Pillow.DecompressionBombError:
        raise BadRequest(image.name, f"has more than {MAX_PIXELS} pixels") from None
    except (OSError, ValueError, SyntaxError, EOFError):  # Pillow raises each of them
        raise BadRequest(image.name, "is no PNG, JPEG, WebP or GIF image, or a damaged one") from None
    if image.media_type and image.media_type != FORMATS[kind]:
        raise BadRequest(image.name, f"is declared as {image.media_type}, but is {FORMATS[kind]}")
    if width * height > MAX_PIXELS:
        raise BadRequest(image.name, f"has {width} x {height} pixels; at most {MAX_PIXELS} are read")
    if num_frames > 1:
        raise BadRequest(image.name, "is animated; give one of its frames")
    return int(width * height)


def read_images(images: Sequence[Image]) -> list[Any]:
    """Decoded by vLLM's own reader, so that a model sees what it sees with vLLM's server. Blocks. Raises BadRequest."""
    if sum(map(check_image, images)) > MAX_ALL_PIXELS:
        raise BadRequest(images[0].name, f"and those after it have more than {MAX_ALL_PIXELS} pixels together")
    reader, found = import_module("vllm.multimodal.media.image").ImageMediaIO(), []
    for image in images:
        try:
            found.append(reader.load_bytes(image.data))
        except (OSError, ValueError, SyntaxError, EOFError, Pillow.DecompressionBombError):
            raise BadRequest(image.name, "cannot be decoded: its file is damaged or cut short") from None
    return found


class Seer:
    """What a model sees of requests. Owned by the loop."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self.sees, self.image_text = _sight_of(llm)

    async def prompt_of(self, order: Start) -> Any:
        """What vLLM is given of a request with images. Raises BadRequest, and ValueError of vLLM's.

        Its own processor puts the images' tokens into the prompt; what the request has behind them stays. The results
        are not taken for known to the engine's core, which of a look hears nothing.
        """
        assert order.sight is not None
        told: dict[str, Any] = {"prompt_token_ids": list(order.sight.prompt_ids)}
        async with self._turn:
            told["multi_modal_data"] = {"image": await asyncio.to_thread(read_images, order.sight.images)}
            (prompt,) = await self._llm.renderer.render_cmpl_async([told], skip_mm_cache=True)
        seen = list(prompt["prompt_token_ids"])
        if not order.is_look:
            if order.prompt_ids[: len(seen)] != seen:
                raise BadRequest(order.sight.images[0].name, "is not what the prompt was made for; ask again")
            prompt["prompt_token_ids"] = order.prompt_ids
        if order.cache_salt:
            prompt["cache_salt"] = order.cache_salt
        return prompt


def _sight_of(llm: Any) -> tuple[bool, str]:
    """Whether the model sees images, and what stands for one in a text; "" where it does not say."""
    config = llm.vllm_config.model_config
    if not config.is_multimodal_model:
        return False, ""
    limits = llm.renderer.get_mm_processor().info.allowed_mm_limits
    if not limits.get("image"):
        return False, ""
    kind = import_module("vllm.model_executor.model_loader").get_model_cls(config)
    return True, kind.get_placeholder_str("image", 1) or ""
