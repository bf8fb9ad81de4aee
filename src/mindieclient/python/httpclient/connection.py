"""How the client reaches a server: URL, TLS, time limits, connection pool, and the retries that are safe."""

import json
import logging
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from mindieclient.python.httpclient.errors import MindIEClientException

logger = logging.getLogger(__name__)

REQUIRED_SSL_OPTIONS = ("ca_certs", "certfile", "keyfile")
OPTIONAL_SSL_OPTIONS = ("password",)
MAX_ERROR_CHARS = 2000
JSON = {"Content-Type": "application/json"}


class Unreachable(MindIEClientException):
    """No server listens there: the only failure that a status query answers with False."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server, and how it is reached. Times in seconds."""

    url: httpx.URL
    context: ssl.SSLContext | None  # None over plain http
    network_timeout_s: float
    connection_timeout_s: float
    api_key: str | None

    def open(self, max_connections: int) -> httpx.Client:
        """A new connection pool. The environment's proxies and .netrc are ignored: the URL alone names the server."""
        limits = httpx.Limits(max_connections=max_connections, max_keepalive_connections=max_connections)
        verify: ssl.SSLContext | bool = self.context if self.context is not None else False
        # A connection that was never established has sent nothing: a retry is safe for every request.
        transport = httpx.HTTPTransport(verify=verify, limits=limits, retries=1, trust_env=False)
        headers = {"Accept": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        timeout = httpx.Timeout(self.network_timeout_s, connect=self.connection_timeout_s)
        return httpx.Client(base_url=self.url, transport=transport, timeout=timeout, headers=headers, trust_env=False)


def checked_url(url: object, enable_ssl: bool) -> httpx.URL:
    """The URL, of scheme, host and port alone. Raises MindIEClientException."""
    if not isinstance(url, str):
        raise MindIEClientException("url must be a string")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise MindIEClientException(f"url is not a URL: {error}") from error
    try:
        parsed.raw_host.decode("ascii").encode("idna")  # as the system's look-up will want it
    except UnicodeError as error:
        raise MindIEClientException(f"url names no host: {error}") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise MindIEClientException("url must look like http://IP:Port or https://IP:Port")
    if parsed.userinfo or parsed.query or parsed.fragment or parsed.path not in ("", "/"):
        raise MindIEClientException("url must be http(s)://IP:Port and nothing more")
    if enable_ssl and parsed.scheme == "http":
        raise MindIEClientException("The scheme should be https when ssl enables!")
    if not enable_ssl and parsed.scheme == "https":
        raise MindIEClientException("The scheme should be http when ssl disables!")
    return httpx.URL(url.rstrip("/"))


def client_context(options: object) -> ssl.SSLContext:
    """Mutual TLS: `ca_certs`, `certfile`, `keyfile`, and `password` for an encrypted key."""
    if not isinstance(options, Mapping):
        raise MindIEClientException("ssl_options must be a dict with ca_certs, certfile and keyfile")
    unknown = sorted(set(options) - {*REQUIRED_SSL_OPTIONS, *OPTIONAL_SSL_OPTIONS})
    if unknown:
        raise MindIEClientException(f"ssl_options has unknown keys: {', '.join(map(str, unknown))}")
    for name in REQUIRED_SSL_OPTIONS:
        path = options.get(name)
        if not isinstance(path, str | Path) or not Path(path).is_file():
            raise MindIEClientException(f"ssl_options[{name!r}] must be the path of a file: {path!r}")
    try:
        context = ssl.create_default_context(cafile=str(options["ca_certs"]))
    except (ssl.SSLError, OSError) as error:
        raise MindIEClientException(f"ssl_options['ca_certs'] holds no certificate: {error}") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # Without a password, "" makes OpenSSL refuse an encrypted key; None would make it ask on the terminal.
        password = str(options.get("password") or "")
        context.load_cert_chain(str(options["certfile"]), str(options["keyfile"]), password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise MindIEClientException(
            f"ssl_options certfile and keyfile cannot be used (not a pair, or wrong password): {error}"
        ) from error
    return context


@contextmanager
def telling(what: str) -> Iterator[None]:
    """A context that turns every network error into a MindIEClientException that says what was being done."""
    try:
        yield
    except httpx.PoolTimeout as error:
        raise MindIEClientException(f"{what}: all connections are in use; raise concurrency") from error
    except httpx.TimeoutException as error:
        raise MindIEClientException(f"{what}: timed out ({type(error).__name__})") from error
    except httpx.RequestError as error:
        if isinstance(error, httpx.ConnectError) and not _is_tls(error):
            raise Unreachable(f"{what}: cannot connect: {error}") from error
        raise MindIEClientException(f"{what}: {type(error).__name__}: {error}") from error


def _is_tls(error: BaseException) -> bool:
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def get(pool: httpx.Client, path: str) -> httpx.Response:
    """GET, repeated once if the connection broke: reading a status twice changes nothing."""
    with telling(f"GET {path}"):
        try:
            response = pool.get(path)
        except (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError) as error:
            if _is_tls(error):
                raise
            logger.debug("GET %s is tried again", path)
            response = pool.get(path)
    return response


def json_bytes(body: dict[str, Any]) -> bytes:
    """The body of a POST. Raises MindIEClientException when JSON cannot express it."""
    try:
        return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise MindIEClientException("the request cannot be sent: it holds half a character") from error
    except (TypeError, ValueError, RecursionError) as error:  # also what a type of the program's own raises
        raise MindIEClientException(f"the parameters are no JSON: {error}") from error


def post(pool: httpx.Client, path: str, body: bytes) -> httpx.Response:
    """POST of JSON, never repeated once sent: the server may be working on it."""
    with telling(f"POST {path}"):
        return pool.post(path, content=body, headers=JSON)


def check_status(response: httpx.Response, path: str) -> None:
    """Raises MindIEClientException for a status that is an error. `response` must have been read."""
    if response.is_success:
        return
    raise MindIEClientException(f"{path} answered {response.status_code}: {_error_text(response)}")


def _error_text(response: httpx.Response) -> str:
    """An error body's message, in any known form: {"error": s}, {"error": {"message": s}}, {"message": s}, plain."""
    try:
        body = json.loads(response.content)
    except (ValueError, RecursionError):
        return response.text[:MAX_ERROR_CHARS]
    found = body.get("error", body.get("message", body)) if isinstance(body, dict) else body
    if isinstance(found, dict):
        found = found.get("message", found)
    return str(found)[:MAX_ERROR_CHARS]
