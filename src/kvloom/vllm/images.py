"""Images in vLLM's form: a file's header is checked before it is decoded. Runs in vLLM's process."""

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
_AT_ONCE = 2  # requests whose images are decoded at the same time
MAX_ALL_PIXELS = 100_000_000  # of all images of a request, which are decoded together


def check_image(image: Image) -> int:
    """Read the file's header. Returns the number of pixels. Raises BadRequest that names the image."""
    try:
        with Pillow.open(io.BytesIO(image.data), formats=tuple(FORMATS)) as found:
            kind, (width, height), num_frames = str(found.format), found.size, getattr(found, "n_frames", 1)
    except Pillow.DecompressionBombError:
        raise BadRequest(image.name, f"has more than {MAX_PIXELS} pixels") from None
    except (OSError, ValueError, SyntaxError, EOFError):  # Pillow may raise any of them
        raise BadRequest(image.name, "is no PNG, JPEG, WebP or GIF image, or a damaged one") from None
    if image.media_type and image.media_type != FORMATS[kind]:
        raise BadRequest(image.name, f"is declared as {image.media_type}, but is {FORMATS[kind]}")
    if width * height > MAX_PIXELS:
        raise BadRequest(image.name, f"has {width} x {height} pixels; at most {MAX_PIXELS} are read")
    if num_frames > 1:
        raise BadRequest(image.name, "is animated; give one of its frames")
    return int(width * height)


def read_images(images: Sequence[Image]) -> list[Any]:
    """Decode images with vLLM's own reader, for the same result as in vLLM's server. Blocks. Raises BadRequest."""
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
    """Prepares requests with images for vLLM. Owned by the loop."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._turn = asyncio.Semaphore(_AT_ONCE)
        self.sees, self.image_text = _sight_of(llm)

    async def prompt_of(self, order: Start) -> Any:
        """The prompt of a request with images, for vLLM. Raises BadRequest, and vLLM's ValueError.

        vLLM's processor inserts the images' tokens into the prompt; tokens of the request behind them stay. The
        processor must not assume that the engine core has cached its results, because a look never reaches the core.
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
    """Whether the model takes images, and an image's placeholder in a text; "" = unknown."""
    config = llm.vllm_config.model_config
    if not config.is_multimodal_model:
        return False, ""
    limits = llm.renderer.get_mm_processor().info.allowed_mm_limits
    if not limits.get("image"):
        return False, ""
    kind = import_module("vllm.model_executor.model_loader").get_model_cls(config)
    return True, kind.get_placeholder_str("image", 1) or ""
