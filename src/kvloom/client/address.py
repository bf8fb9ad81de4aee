"""The address of a server as people write it, and why nothing useful came from there."""

import re

import httpx

from kvloom.contract.errors import BadRequest

_NUMBER = re.compile(r"^\[Errno -?\d+\] ")  # that an OSError puts before its text


def without_version(url: str) -> str:
    """`url` without the /v1 at its end, with which OpenAI's clients want it."""
    return url.rstrip("/").removesuffix("/v1")


def authorization(api_key: str | None) -> dict[str, str]:
    """The header with the key, none without. Raises BadRequest for a key that no header can carry."""
    if not api_key:
        return {}
    if not (api_key.isascii() and api_key.isprintable()):
        raise BadRequest("api_key", "must be printable ASCII characters")
    return {"Authorization": f"Bearer {api_key}"}


def why_not_listed(error: httpx.HTTPError | httpx.InvalidURL) -> str:
    """One line: why a server did not list its models, and what to do about it."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        hint = "; give its key with --api-key" if status in (401, 403) else ""
        return f"it answered {status} {error.response.reason_phrase} to /v1/models{hint}"
    if isinstance(error, httpx.UnsupportedProtocol):
        return "an address begins with http:// or https://"
    if isinstance(error, httpx.ConnectError):
        return f"{_NUMBER.sub('', str(error))}; is it running? `kvloom serve` starts one"
    return str(error) or type(error).__name__
