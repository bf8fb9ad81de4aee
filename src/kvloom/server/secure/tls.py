"""Mutual TLS of the server: files are checked when they are loaded, and reloaded without dropping a connection."""

import asyncio
import logging
import signal
import ssl
from collections.abc import Callable

from kvloom.net.tls import load_context
from kvloom.net.tlsconfig import TlsConfig, TlsError

logger = logging.getLogger(__name__)


class ServerContext(ssl.SSLContext):
    """An SSLContext that asyncio keeps for the life of a listener, while `reload` changes what new handshakes use.

    asyncio and uvloop make every connection's TLS state with `wrap_bio`, so connections that exist keep the files that
    they began with.
    """

    _config: TlsConfig
    _current: ssl.SSLContext

    def __new__(cls, config: TlsConfig) -> "ServerContext":
        context = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        context._config = config
        context.reload()
        return context

    def __init__(self, config: TlsConfig) -> None:
        """Everything is done in `__new__`, because only that can choose the protocol."""

    def reload(self) -> None:
        """Read the files again. Raises TlsError and keeps the old ones in use if they are invalid."""
        self._current = _load(self._config)

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        return self._current.wrap_bio(incoming, outgoing, server_side, server_hostname, session)


class _LoggedHandshake(ssl.SSLObject):
    """Logs why a handshake failed: asyncio drops such a connection silently."""

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            logger.warning(
                "TLS handshake refused: %s", getattr(error, "verify_message", "") or error.reason or "broken"
            )
            raise


def tls_context(config: TlsConfig) -> ServerContext:
    """Raises TlsError, one sentence, for the first thing that is wrong."""
    return ServerContext(config)


def reload_on_sighup(context: ServerContext, loop: asyncio.AbstractEventLoop) -> Callable[[], None]:
    """Returns the handler, which a caller may also call directly. Invalid files are logged and change nothing."""

    def reload() -> None:
        try:
            context.reload()
        except TlsError as error:
            logger.error("TLS files are not reloaded, the ones in use stay: %s", error)
        else:
            logger.info("TLS files reloaded")

    loop.add_signal_handler(signal.SIGHUP, reload)
    return reload


def _load(config: TlsConfig) -> ssl.SSLContext:
    context = load_context(config, ssl.PROTOCOL_TLS_SERVER)
    context.sslobject_class = _LoggedHandshake
    context.set_alpn_protocols(["http/1.1"])
    return context
