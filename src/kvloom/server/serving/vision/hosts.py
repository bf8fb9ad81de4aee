"""Servers and addresses that images may be fetched from. Pure."""

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
_NAME = re.compile(r"(\*|(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*)\Z")
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@dataclass(frozen=True, slots=True)
class ImageHosts:
    """Host names, and non-public networks that are allowed nevertheless."""

    names: frozenset[str] = frozenset()  # "*.name" = all below it, "*" = any
    networks: tuple[Network, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.names or self.networks)

    def allows(self, host: str) -> bool:
        """Whether a URL may name the host; the addresses that it resolves to are checked separately."""
        host = host.lower().rstrip(".").removeprefix("[").removesuffix("]")
        address = _address(host)
        if address is not None:
            return host in self.names or self._has(address) or "*" in self.names
        labels = host.split(".")
        above = {"*." + ".".join(labels[i:]) for i in range(1, len(labels))}
        return "*" in self.names or host in self.names or bool(above & self.names)

    def allows_address(self, text: str) -> bool:
        """Whether a connection to the address is allowed: it is public, or in one of the networks."""
        address = _address(text.partition("%")[0])
        if address is None:
            return False
        inner = _embedded(address)
        return self._has(address) or all(part.is_global and not part.is_multicast for part in (address, *inner))

    def _has(self, address: Address) -> bool:
        """Whether the networks contain an address, or the one embedded in it."""
        found = _embedded(address) or [address]
        return all(any(part.version == net.version and part in net for net in self.networks) for part in found)


def image_hosts(entries: Iterable[object]) -> ImageHosts:
    """From names, "*.name", "*", addresses and networks like 10.1.0.0/16. Raises ValueError that names an invalid
    entry.
    """
    names, networks = set[str](), list[Network]()
    for entry in entries:
        text = str(entry).lower().rstrip(".")
        try:
            networks.append(ipaddress.ip_network(text.removeprefix("[").removesuffix("]")))
        except ValueError:
            if not _NAME.match(text) or text.replace(".", "").isdigit():
                raise ValueError(f"{entry!r} is no host name, *.name, * or network such as 10.1.0.0/16") from None
            names.add(text)
    return ImageHosts(frozenset(names), tuple(networks))


def checked_image_hosts(entries: Iterable[object]) -> frozenset[str]:
    """The entries, if all are valid. Raises ValueError."""
    found = frozenset(map(str, entries))
    image_hosts(found)
    return found


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _embedded(address: Address) -> list[Address]:
    """IPv4 addresses embedded in an IPv6 address."""
    if isinstance(address, ipaddress.IPv4Address):
        return []
    found: list[Address] = [part for part in (address.ipv4_mapped, address.sixtofour) if part is not None]
    if address.teredo is not None:
        found += address.teredo
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return found
