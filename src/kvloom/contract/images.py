"""Images of a request, for models with vision. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Image:
    """One image: its file as received. `media_type` as declared, "" = not declared; `name`: how errors call it."""

    data: bytes
    media_type: str = ""
    name: str = "image"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Sight:
    """The images of a prompt, in order, and its tokens as the chat template writes them.

    An engine replaces each image's placeholder in `prompt_ids` by the image's tokens. The resulting prompt is the
    beginning of Request.prompt_ids, except for a request that asks for just this prompt.
    """

    prompt_ids: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()

    def told_apart(self, prompt_ids: Sequence[int]) -> list[int]:
        """Numbers for the tokens of a prompt that begins with this sight: different where its tokens or its images
        differ.

        Up to the first image they are the tokens. For code that compares prefixes of prompts and does not know images.
        """
        whole = hashlib.sha256()
        for image in self.images:
            whole.update(hashlib.sha256(image.data).digest())
        mask = int.from_bytes(whole.digest()[:8], "little") >> 1
        pairs = enumerate(zip(self.prompt_ids, prompt_ids, strict=False))
        start = max(0, next((i for i, (plain, seen) in pairs if plain != seen), 0) - 1)
        return [*prompt_ids[:start], *(mask ^ token for token in prompt_ids[start:])]
