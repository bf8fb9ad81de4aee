"""Images for requests, and invalid data in their place."""

import base64
import io
import struct
import zlib

from PIL import Image


def png(colour: str = "red", size: tuple[int, int] = (16, 16), kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


def huge_png(side: int = 20_000) -> bytes:
    """A PNG whose header claims this many pixels a side, without any image data."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def animated() -> bytes:
    file = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def in_base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{in_base64(data)}"
