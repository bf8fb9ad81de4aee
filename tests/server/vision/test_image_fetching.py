"""Images fetched from other servers: allowed hosts and addresses, redirects, limits and errors (docs/security.md)."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvloom.contract.errors import BadRequest
from kvloom.server.config.settings import Settings
from kvloom.server.serving.vision import fetching
from kvloom.server.serving.vision.fetching import MAX_REDIRECTS, Fetcher
from kvloom.server.serving.vision.hosts import image_hosts
from kvloom.server.serving.vision.sources import MAX_IMAGE_BYTES, ImageSource
from tests.support.images import png

Handler = Callable[[str, asyncio.StreamWriter], Awaitable[None]]
RED = png("red")
PNG = b"HTTP/1.1 200 OK\r\nContent-Type: image/png\r\n"


@pytest.mark.parametrize(
    ("entries", "host", "is_allowed"),
    [
        (["a.example"], "a.example", True),
        (["a.example"], "A.EXAMPLE.", True),
        (["a.example"], "b.a.example", False),
        (["a.example"], "a.example.evil.com", False),
        (["*.a.example"], "b.c.a.example", True),
        (["*.a.example"], "a.example", False),
        (["*.a.example"], "xa.example", False),
        (["*"], "anything.example", True),
        ([], "a.example", False),
        (["10.0.0.0/8"], "10.1.2.3", True),
        (["10.0.0.0/8"], "[::ffff:10.1.2.3]", True),
        (["10.0.0.0/8"], "11.1.2.3", False),
        (["10.0.0.0/8"], "a.example", False),
    ],
)
def test_a_url_may_name_hosts_that_are_listed(entries, host, is_allowed):
    assert image_hosts(entries).allows(host) is is_allowed


NOT_PUBLIC = [
    "127.0.0.1", "10.0.0.1", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::", "::1", "fe80::1", "fe80::1%eth0",
    "fc00::1", "ff02::1", "2001:db8::1", "::ffff:10.0.0.1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "2002:7f00:1::",
    "2001:0:7f00:1::", "nonsense",
]  # fmt: skip


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_only_public_addresses_are_connected_to_unless_they_are_listed(address):
    assert not image_hosts(["*"]).allows_address(address)
    assert not image_hosts(["8.8.8.0/24", "a.example"]).allows_address(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111"])
def test_public_addresses_are(address):
    assert image_hosts(["a.example"]).allows_address(address)


def test_a_network_that_is_listed_may_be_reached_however_it_is_written():
    hosts = image_hosts(["10.0.0.0/8", "::1"])
    assert all(map(hosts.allows_address, ["10.0.0.1", "::ffff:10.0.0.1", "64:ff9b::a00:1", "::1"]))
    assert not any(map(hosts.allows_address, ["127.0.0.1", "::ffff:127.0.0.1", "192.168.0.1"]))


@given(st.ip_addresses())
def test_private_addresses_are_refused_whatever_they_are(address):
    if address.is_private or address.is_loopback or address.is_multicast or address.is_link_local:
        assert not image_hosts(["*"]).allows_address(str(address))


@pytest.mark.parametrize(
    "entry", ["http://a.example", "a.example:80", "a b", "", "10.0.0", "10.0.0.1/33", "*a.example"]
)
def test_an_entry_that_is_neither_name_nor_network_is_refused_by_name(entry):
    with pytest.raises(BadRequest, match=r"allowedImageHosts: .* is no host name"):
        Settings({"models": [{"backend": "fake"}], "image_hosts": [entry]}).build()


# -- fetching from a server in this process


def fetched(handler: Handler, url: str = "http://127.0.0.1:{port}/a", **more: object) -> ImageSource:
    """`handler` receives the path of each request."""

    async def main() -> ImageSource:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            try:
                await handler(head.split()[1].decode(), writer)
            finally:
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            fetcher = Fetcher(image_hosts(more.get("hosts", ["127.0.0.1"])), float(more.get("limit_s", 30)))
            source = ImageSource("images[0]", url=url.format(port=port))
            return await fetcher.fetch(source, more.get("check_total", lambda num_bytes: None))
        finally:
            server.close()

    return asyncio.run(main())


def answering(*pieces: bytes) -> Handler:
    async def handler(path: str, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return handler


def test_an_image_is_fetched_and_keeps_its_type():
    found = fetched(answering(PNG, b"Content-Length: %d\r\n\r\n" % len(RED), RED))
    assert (found.data, found.media_type, found.url) == (RED, "image/png", "")


def test_every_byte_is_told_while_it_comes_and_who_is_told_may_end_it():
    told: list[int] = []
    fetched(answering(PNG, b"\r\n", RED), check_total=told.append)
    assert sum(told) == len(RED)

    def refuse(num_bytes: int) -> None:
        raise BadRequest("images", "are too large")

    with pytest.raises(BadRequest, match="images: are too large"):
        fetched(_endless, check_total=refuse)


def test_files_that_a_server_does_not_declare_are_taken_as_they_are():
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n\r\n"
    assert fetched(answering(head, RED)).media_type == ""


async def _endless(path: str, writer: asyncio.StreamWriter) -> None:
    writer.write(PNG + b"\r\n")
    while not writer.is_closing():
        writer.write(b"\0" * (1 << 16))
        await writer.drain()


async def _silent(path: str, writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(3600)


def redirecting(to: str) -> Handler:
    return answering(f"HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\n\r\n".encode())


REFUSED = [
    (answering(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"), "could not be fetched: its server answers 404"),
    (answering(b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\n\r\n<p>"), "is declared as 'text/html'"),
    (answering(PNG, b"Content-Length: 0\r\n\r\n"), "is empty"),
    (answering(PNG, b"Content-Length: %d\r\n\r\n" % (MAX_IMAGE_BYTES + 1), RED), "is larger than 20971520 bytes"),
    (answering(PNG, b"Content-Encoding: gzip\r\n\r\n", RED), "sends it compressed"),
    (answering(PNG, b"Content-Length: 100\r\n\r\n", b"cut"), "the connection failed"),
    (answering(b"\0\0nonsense\r\n\r\n"), "the connection failed"),
    (answering(), "the connection failed"),
    (_endless, "is larger than 20971520 bytes"),
    (redirecting("http://127.0.0.2/x"), "the host '127.0.0.2' is none that this server fetches images from"),
    (redirecting("http://[::ffff:10.0.0.1]/x"), "is none that this server fetches images from"),
    (redirecting("file:///etc/passwd"), "leads to what is no http or https URL"),
    (redirecting("http://a:b@127.0.0.1/x"), "must not hold a user name"),
    (redirecting("/again"), f"is redirected more than {MAX_REDIRECTS} times"),
]


@pytest.mark.parametrize(("handler", "problem"), REFUSED, ids=[problem for _, problem in REFUSED])
def test_what_is_no_image_ends_with_a_sentence_that_names_it(handler, problem):
    with pytest.raises(BadRequest) as caught:
        fetched(handler)
    assert caught.value.field == "images[0]"
    assert problem in str(caught.value)


def test_a_server_that_says_nothing_is_given_up():
    with pytest.raises(BadRequest, match=r"images\[0\]: could not be fetched within 0.05 s"):
        fetched(_silent, limit_s=0.05)


@pytest.mark.parametrize("hosts", [["localhost"], ["*"]])
def test_a_name_that_leads_to_this_machine_is_refused_before_anything_is_sent(hosts):
    with pytest.raises(BadRequest, match="leads to an address that is not allowed"):
        fetched(_silent, "http://localhost:{port}/a", hosts=hosts)


def test_a_listed_name_and_network_together_reach_it():
    found = fetched(answering(PNG, b"\r\n", RED), "http://localhost:{port}/a", hosts=["localhost", "127.0.0.1", "::1"])
    assert found.data == RED


@pytest.fixture
def leads_to(monkeypatch):
    """Sets the addresses to which names resolve: on the first lookup of a name, and on later ones."""

    def lead(*times: list[str]) -> None:
        left = list(times)

        def resolved(host: str, port: int, *_: object, **__: object) -> list[tuple[object, ...]]:
            found = left.pop(0) if len(left) > 1 else left[0]
            return [(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (each, port)) for each in found]

        monkeypatch.setattr(socket, "getaddrinfo", resolved)

    return lead


@pytest.mark.parametrize("addresses", [["127.0.0.1", "127.0.0.2"], ["127.0.0.2", "127.0.0.1"]])
def test_each_address_of_a_name_must_be_allowed(leads_to, addresses):
    leads_to(addresses)
    with pytest.raises(BadRequest, match="leads to an address that is not allowed"):
        fetched(answering(PNG, b"\r\n", RED), "http://a.example:{port}/a", hosts=["a.example", "127.0.0.1"])


def test_what_a_name_leads_to_a_moment_later_does_not_count(leads_to):
    leads_to(["127.0.0.1"], ["127.0.0.2"])
    found = fetched(answering(PNG, b"\r\n", RED), "http://a.example:{port}/a", hosts=["a.example", "127.0.0.1"])
    assert found.data == RED


@pytest.mark.parametrize(("start", "goes"), [(MAX_REDIRECTS, True), (MAX_REDIRECTS + 1, False)])
def test_so_many_redirects_are_followed_and_no_more(start, goes):
    async def count_down(path: str, writer: asyncio.StreamWriter) -> None:
        left = int(path[1:])
        await (redirecting(f"/{left - 1}") if left else answering(PNG, b"\r\n", RED))(path, writer)

    if goes:
        assert fetched(count_down, f"http://127.0.0.1:{{port}}/{start}").data == RED
    else:
        with pytest.raises(BadRequest, match=f"is redirected more than {MAX_REDIRECTS} times"):
            fetched(count_down, f"http://127.0.0.1:{{port}}/{start}")


def test_nobody_is_led_from_https_to_http():
    fetcher, before = Fetcher(image_hosts(["*"])), httpx.URL("https://a.example/x")
    assert fetcher._checked("/y", before) == "https://a.example/y"
    with pytest.raises(fetching._Refused, match="is redirected from https to http"):
        fetcher._checked("http://a.example/y", before)


def test_who_has_his_image_or_none_leaves_his_place_to_the_next(monkeypatch):
    monkeypatch.setattr(fetching, "_MAX_WAITING", 1)

    async def main() -> None:
        fetcher = Fetcher(image_hosts(["127.0.0.1"]))
        for _ in range(3):
            with pytest.raises(BadRequest, match="none that this server fetches images from"):
                await fetcher.fetch(ImageSource("i", url="http://a.example/"), lambda num_bytes: None)

    asyncio.run(main())


def test_proxies_of_the_environment_are_not_asked(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert fetched(answering(PNG, b"\r\n", RED)).data == RED


def test_leaving_ends_the_connection():
    async def main() -> None:
        begun, gone = asyncio.Event(), asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            begun.set()
            assert await reader.read() == b""
            gone.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a"
        fetcher = Fetcher(image_hosts(["127.0.0.1"]))
        task = asyncio.ensure_future(fetcher.fetch(ImageSource("i", url=url), lambda num_bytes: None))
        await begun.wait()
        task.cancel()
        await asyncio.wait_for(gone.wait(), 120)
        server.close()

    asyncio.run(main())
