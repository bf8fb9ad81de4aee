"""Which requests come from a web page that has no business here. Pure: the head of a request in, a refusal or None out.

A page of any site can make its visitor's browser send requests to this machine. Three things give it away: the name
it asks for (one of its own that resolves to this address: DNS rebinding), what the browser says of the page
(Sec-Fetch-Site, Origin), and a content type that a form may have, for which browsers ask no leave (preflight).
"""

import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\s\[\]:@/?#,*]+))(?::[0-9]*)?", re.IGNORECASE)
_ALLOWED = re.compile(r"\*|(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@*]+")
_OWN_SITES = ("same-origin", "none")  # "none": the person typed the address
_BODY_METHODS = ("POST", "PUT", "PATCH", "DELETE")
_BODY_TYPES = re.compile(r"application/(?:json|[\w.-]+\+json|octet-stream)")  # what no page may send unasked


@dataclass(frozen=True, slots=True)
class Policy:
    """Addresses and localhost are always right for a Host: no page of another site has them as its own name."""

    hosts: frozenset[str] = frozenset()  # names that Host may have too, lower case; "*.a.b": all below; "*": any
    origins: frozenset[str] = frozenset()  # whose pages may ask, as "https://a.example"; "*": any
    pages: frozenset[str] = frozenset()  # paths for people: a link on another site may lead there
    curl_paths: tuple[str, ...] = ()  # beginnings of paths whose documents send JSON by `curl -d`, as a form's type
    has_keys: bool = False  # a key is asked for later on; who shows one need not be known by the Host's name


@dataclass(frozen=True, slots=True)
class Refusal:
    """The HTTP status, and one sentence."""

    status: int
    text: str


def refusal(policy: Policy, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
    """Why the request is not answered; None when it is.

    `headers` have lower-case names; values of one name are joined by ", ".
    """
    host = headers.get("host")
    shows_key = policy.has_keys and ("authorization" in headers or "x-api-key" in headers)
    if host is not None and not shows_key and not _is_known(host, policy.hosts):
        return Refusal(
            421, f"the host {host[:100]!r} is not known here; --allowed-host NAME (allowedHosts in config.json) adds it"
        )
    if _is_foreign(policy, host or "", headers) and not _is_link(policy, method, path, headers):
        page = headers.get("origin", "another site")
        return Refusal(403, f"a page of {page[:100]} may not call this; corsOrigins of a server names those that may")
    if method in _BODY_METHODS and not _is_read(policy, path, headers):
        kind = headers["content-type"]
        return Refusal(415, f"a body of type {kind[:100]} is not read; send it with Content-Type: application/json")
    return None


def checked_hosts(names: Iterable[object]) -> frozenset[str]:
    """Names for `Policy.hosts`. Raises ValueError for an invalid one."""
    return frozenset(_checked(name, _ALLOWED, "a host name, as a.example, *.a.example or *") for name in names)


def checked_origins(origins: Iterable[object]) -> frozenset[str]:
    """Origins for `Policy.origins`. Raises ValueError for an invalid one."""
    return frozenset(_checked(origin, _ORIGIN, "an origin, as https://a.example, or *") for origin in origins)


def _checked(text: object, form: re.Pattern[str], wanted: str) -> str:
    if not isinstance(text, str) or not form.fullmatch(text.lower()):
        raise ValueError(f"must be {wanted}, got {text!r}")
    return text.lower()


def _is_known(host: str, names: frozenset[str]) -> bool:
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = (found["address"] or found["name"]).lower().removesuffix(".")
    if "*" in names or name in names or name == "localhost" or name.endswith(".localhost") or _is_address(name):
        return True
    parts = name.split(".")
    return any("*." + ".".join(parts[i:]) in names for i in range(1, len(parts)))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_foreign(policy: Policy, host: str, headers: Mapping[str, str]) -> bool:
    """Whether a browser sent it for a page that is not ours and may not ask. Browsers alone send these headers."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if "*" in policy.origins or (origin is not None and origin.lower() in policy.origins):
        return False
    if site is not None:
        return site not in _OWN_SITES
    return origin is not None and origin.lower().partition("://")[2] != host.lower()


def _is_read(policy: Policy, path: str, headers: Mapping[str, str]) -> bool:
    """Whether a body of this content type is; `headers` has one unless it is."""
    given = headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if not given or _BODY_TYPES.fullmatch(kind):
        return True
    is_browser = "origin" in headers or "sec-fetch-site" in headers
    return kind == "application/x-www-form-urlencoded" and not is_browser and path.startswith(policy.curl_paths)


def _is_link(policy: Policy, method: str, path: str, headers: Mapping[str, str]) -> bool:
    """Whether a person follows a link to a page; the other site sees nothing of it."""
    goes = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return goes and method == "GET" and path in policy.pages


def joined(pairs: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """Headers by lower-case name, as HTTP reads those that come several times."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in pairs:
        found[name.lower()].append(value)
    return {name: ", ".join(values) for name, values in found.items()}
