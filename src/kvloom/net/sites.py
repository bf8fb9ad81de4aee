"""Refuses requests sent by other sites' web pages. Pure: takes the head of a request, returns a refusal or None.

A page of any site can make its visitor's browser send requests to this machine. Three things reveal it: the host name
in the request (one of its own that resolves to this address: DNS rebinding), the browser's headers about the page
(Sec-Fetch-Site, Origin), and a content type of HTML forms, for which browsers send no preflight.
"""

import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\s\[\]:@/?#,*]+))(?::[0-9]*)?", re.IGNORECASE)
_ALLOWED = re.compile(r"\*|(?:\*\.)?[a-z0-9_-]+(?:\.[a-z0-9_-]+)*")
_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^\s/?#@*]+")
_OWN_SITES = ("same-origin", "none")  # "none": the user typed the address
_BODY_METHODS = ("POST", "PUT", "PATCH", "DELETE")
# content types that pages can only send after a preflight
_BODY_TYPES = re.compile(r"application/(?:json|[\w.-]+\+json|octet-stream)")


@dataclass(frozen=True, slots=True)
class Policy:
    """What is allowed. Addresses and localhost are always valid Hosts: no other site can have them as its name."""

    hosts: frozenset[str] = frozenset()  # further names for Host, lower case; "*.a.b": all below; "*": any
    origins: frozenset[str] = frozenset()  # origins whose pages may send requests, as "https://a.example"; "*": any
    pages: frozenset[str] = frozenset()  # paths of pages, which links on other sites may lead to
    curl_paths: tuple[str, ...] = ()  # prefixes of paths whose documentation uses `curl -d`: JSON with a form's type
    has_keys: bool = False  # keys are checked later; a request with one may have any Host


@dataclass(frozen=True, slots=True)
class Refusal:
    """The HTTP status, and one sentence."""

    status: int
    text: str


def refusal(policy: Policy, method: str, path: str, headers: Mapping[str, str]) -> Refusal | None:
    """Why the request is refused; None when it is allowed.

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
    """Whether a browser sent it for a foreign page that is not allowed. Only browsers send these headers."""
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if "*" in policy.origins or (origin is not None and origin.lower() in policy.origins):
        return False
    if site is not None:
        return site not in _OWN_SITES
    return origin is not None and origin.lower().partition("://")[2] != host.lower()


def _is_read(policy: Policy, path: str, headers: Mapping[str, str]) -> bool:
    """Whether a body of this content type is accepted; one without a type always is."""
    given = headers.get("content-type", "")
    kind = given.partition(";")[0].strip().lower()
    if not given or _BODY_TYPES.fullmatch(kind):
        return True
    is_browser = "origin" in headers or "sec-fetch-site" in headers
    return kind == "application/x-www-form-urlencoded" and not is_browser and path.startswith(policy.curl_paths)


def _is_link(policy: Policy, method: str, path: str, headers: Mapping[str, str]) -> bool:
    """Whether a user follows a link to a page, of which the other site sees nothing."""
    goes = (headers.get("sec-fetch-mode"), headers.get("sec-fetch-dest")) == ("navigate", "document")
    return goes and method == "GET" and path in policy.pages


def joined(pairs: Iterable[tuple[str, str]]) -> Mapping[str, str]:
    """Headers by lower-case name; repeated ones are joined as in HTTP."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, value in pairs:
        found[name.lower()].append(value)
    return {name: ", ".join(values) for name, values in found.items()}
