"""What a request shows to a model that sees. Pure."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Image:
    """One image: its file as it came. `media_type` as it was declared, "" = not at all; `name`: how errors call it."""

    data: bytes
    media_type: str = ""
    name: str = "image"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Sight:
    """The images of a prompt, in order, and its tokens as the chat template writes them.

    An engine puts the tokens of each image where `prompt_ids` have what stands for it. The prompt that it makes so is
    the beginning of Request.prompt_ids, but for a request that asks for just that.
    """

    prompt_ids: tuple[int, ...] = ()
    images: tuple[Image, ...] = ()

    def told_apart(self, prompt_ids: Sequence[int]) -> list[int]:
        """A prompt that begins with this sight as numbers, one a token, that differ where its tokens or its images do.

        Up to the first image they are the tokens. For who compares prefixes of prompts and knows no images.
        """
        whole = hashlib.sha256()
        for image in self.images:
            whole.update(hashlib.sha256(image.data).digest())
        mask = int.from_bytes(whole.digest()[:8], "little") >> 1
        pairs = enumerate(zip(self.prompt_ids, prompt_ids, strict=False))
        start = max(0, next((i for i, (plain, seen) in pairs if plain != seen), 0) - 1)
        return [*prompt_ids[:start], *(mask ^ token for token in prompt_ids[start:])]
