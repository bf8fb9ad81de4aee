"""Images as requests name them: in base64, or by a URL. Pure; nothing is decoded but base64."""

import binascii
import re
from dataclasses import dataclass
from pickle import PickleBuffer
from typing import Any

from kvloom.contract.errors import BadRequest

MAX_IMAGES = 64  # images of one request
MAX_IMAGE_BYTES = 20 * 2**20  # bytes of one image's file
MAX_ALL_BYTES = 40 * 2**20  # bytes of all images of a request
MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")
_ALIASES = {"image/jpg": "image/jpeg"}
_DATA = re.compile(r"data:([\w.+/-]*)(;[\w.+-]+=[\w.+-]+)*(;base64)?,", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """An image's file, or its `url` if it must be fetched. `name`: how errors call it."""

    name: str
    data: bytes = b""
    media_type: str = ""  # as declared; "" = not declared
    url: str = ""

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickles the file out of band where the pickler supports that."""
        data = PickleBuffer(self.data) if protocol >= 5 else self.data
        return ImageSource, (self.name, data, self.media_type, self.url)


def source_of_url(url: str, name: str) -> ImageSource:
    """From a data: URL in base64, or a URL to fetch. Raises BadRequest."""
    scheme = url[:8].partition(":")[0].lower()
    if scheme in ("http", "https"):
        return ImageSource(name, url=url)
    if scheme != "data":
        raise BadRequest(name, "must be a data: URL with an image in base64, or an http or https URL")
    head = _DATA.match(url)
    if head is None or head[3] is None:
        raise BadRequest(name, "must be of the form data:image/png;base64,...")
    return source_of_base64(url[head.end() :], head[1], name)


def source_of_base64(text: str, media_type: str, name: str) -> ImageSource:
    """`media_type` "": not declared. Raises BadRequest."""
    declared = checked_type(media_type, name) if media_type else ""
    check_size(3 * (len(text) // 4), name)
    try:
        data = binascii.a2b_base64(text, strict_mode=True)
    except ValueError:  # binascii.Error is one
        data = None
    if data is None or len(text) % 4:  # it accepts padding behind a complete group
        raise BadRequest(name, "is not valid base64")
    if not data:
        raise BadRequest(name, "is empty")
    return ImageSource(name, data, declared)


def checked_type(media_type: str, name: str) -> str:
    """The type in lower case, if it is one that can be read. Raises BadRequest."""
    found = media_type.partition(";")[0].strip().lower()
    found = _ALIASES.get(found, found)
    if found not in MEDIA_TYPES:
        raise BadRequest(name, f"is declared as {found[:60]!r}; must be one of {', '.join(MEDIA_TYPES)}")
    return found


def check_size(num_bytes: int, name: str) -> None:
    """Raises BadRequest."""
    if num_bytes > MAX_IMAGE_BYTES + 2:  # the length of base64 text is exact up to two bytes
        raise BadRequest(name, f"is larger than {MAX_IMAGE_BYTES} bytes")
