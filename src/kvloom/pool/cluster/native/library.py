"""The C++ library for transferring blocks between nodes (stream.cpp)."""

import ctypes
import logging
from ctypes import c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import NamedTuple

from ems.native.build import Library
from ems.native.library import Xxh3, is_to_be_compiled, load, sums_alike, xxh3
from ems.wire.messages import SUM_BYTES

log = logging.getLogger(__name__)
STREAM = Library("libkvloom_stream", Path(__file__).parent)
# instead of an errno: the peer has closed the connection; TLS refuses what came
CLOSED, BROKEN = -1, -2
TLS_FUNCTIONS = ("SSL_read", "SSL_write", "SSL_get_error", "BIO_read", "BIO_write", "ERR_clear_error")


class TlsEnds(ctypes.Structure):
    """`Tls` in tls.hpp: addresses of an SSL*, of the memory BIOs that it reads from and writes to, and of OpenSSL's
    functions.
    """

    _fields_ = [(name, c_void_p) for name in ("ssl", "from_peer", "to_peer", *TLS_FUNCTIONS)]


class Functions(NamedTuple):
    """The library; its functions release the interpreter lock."""

    library: ctypes.CDLL
    xxh3: Xxh3


def declare(library: ctypes.CDLL) -> None:
    """Declare types of arguments and results. Raises OSError when its checksums differ from Python's."""
    functions, tls = ctypes.POINTER(Xxh3), ctypes.POINTER(TlsEnds)
    library.stream_sum.argtypes = [functions, c_void_p, c_uint64, c_void_p]
    library.stream_sum.restype = None
    library.stream_receive.argtypes = [c_int, tls, functions, c_void_p, c_int64, c_int64, c_void_p]
    library.stream_send.argtypes = [c_int, tls, c_void_p, c_int64, c_int64]
    library.stream_receive.restype = library.stream_send.restype = c_int

    def sum_of(data: bytes) -> bytes:
        out = ctypes.create_string_buffer(SUM_BYTES)
        library.stream_sum(xxh3(), data, len(data), out)
        return out.raw

    if not sums_alike(sum_of):
        raise OSError("its sums are not those of xxhash")


def functions() -> Functions | None:
    """Those of the library; None where it cannot be had."""
    library, summing = load(STREAM, declare), xxh3()
    return None if library is None or summing is None else Functions(library, summing)


def prepare() -> None:
    """Load the library before a call needs it: the first time on a machine it is compiled, which is logged."""
    if is_to_be_compiled(STREAM):
        log.info("compiling %s, once on this machine", STREAM.name)
    functions()
