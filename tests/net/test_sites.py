"""The decision, without a server, which requests a page of another site may have sent."""

import pytest

from kvloom.net.sites import Policy, Refusal, checked_hosts, checked_origins, joined, refusal

NAMED = Policy(
    checked_hosts(["chat.example", "*.pool.example"]), checked_origins(["https://a.example"]), frozenset("/")
)


def status(policy: Policy = NAMED, method: str = "POST", path: str = "/generate", **headers: str) -> int:
    """The status of a refusal, or 200 if the request is allowed; header names are written with _ for -."""
    given = {"host": "127.0.0.1:1025", **{name.replace("_", "-"): value for name, value in headers.items()}}
    refused = refusal(policy, method, path, given)
    return refused.status if refused else 200


OURS = [
    "127.0.0.1",
    "127.0.0.1:1025",
    "localhost:80",
    "LocalHost.",
    "app.localhost",
    "[::1]:1025",
    "[::1]",
    "10.1.2.3:99",
    "chat.example",
    "Chat.Example:8443",
    "chat.example.",
    "n1.pool.example",
    "a.b.pool.example:1",
]
FOREIGN = [
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "evil-localhost",
    "pool.example",
    "xchat.example",
    ":1025",
    "127.0.0.1@evil.example",
    "evil.example/127.0.0.1",
    "[evil]",
    "a:b:c",
    "chat.example..",
    "[::1",
    "127.0.0.1:x",
    "*",
    "*.pool.example",
]


@pytest.mark.parametrize("host", OURS)
def test_addresses_localhost_and_configured_names_are_known(host):
    assert status(host=host) == 200


@pytest.mark.parametrize("host", [*FOREIGN, "", "a b", "127.0.0.1, evil.example", "x" * 100_000])
def test_other_names_are_misdirected(host):
    assert status(host=host) == 421


def test_no_host_at_all_is_no_browser():
    assert refusal(NAMED, "GET", "/health", {}) is None


def test_any_name_may_be_allowed():
    assert status(Policy(checked_hosts(["*"])), host="evil.example") == 200


def test_who_shows_a_key_may_ask_under_any_name_where_keys_are_asked_for():
    keyed = Policy(has_keys=True)
    assert status(keyed, host="svc", authorization="Bearer x") == status(keyed, host="svc", x_api_key="x") == 200
    assert status(keyed, host="svc") == 421
    assert status(Policy(), host="svc", authorization="Bearer x") == 421
    assert status(keyed, host="svc", authorization="Bearer x", sec_fetch_site="cross-site") == 403


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE", "OPTIONS", "PUT", "HEAD"])
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"sec_fetch_site": "same-origin", "origin": "http://127.0.0.1:1025"}, 200),
        ({"sec_fetch_site": "none"}, 200),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site", "origin": "http://127.0.0.1:3000"}, 403),
        ({"sec_fetch_site": "news-to-us"}, 403),
        ({"origin": "http://127.0.0.1:1025"}, 200),  # browsers send Sec-Fetch-Site only to trustworthy addresses
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:3000"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": ""}, 403),
        ({"origin": "https://a.example", "sec_fetch_site": "cross-site"}, 200),
        ({"origin": "https://a.example"}, 200),
        ({"origin": "http://a.example"}, 403),
        ({"origin": "https://a.example.evil.example", "sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}, 403),
    ],
)
def test_pages_of_other_sites_are_refused(method, headers, expected):
    assert status(method=method, **headers) == expected


def test_a_link_of_another_site_leads_to_a_page_and_nowhere_else():
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert status(method="GET", path="/", **link) == 200
    assert status(method="GET", path="/stopService", **link) == 403
    assert status(method="POST", path="/", **link) == 403
    assert status(method="GET", path="/", **{**link, "sec_fetch_dest": "iframe"}) == 403


def test_every_page_may_ask_where_every_origin_is_allowed():
    assert status(Policy(origins=checked_origins(["*"])), sec_fetch_site="cross-site") == 200


@pytest.mark.parametrize(
    ("content_type", "expected"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/vnd.api+json", 200),
        ("application/octet-stream", 200),
        ("", 200),  # tritonclient sends no Content-Type
        ("text/plain", 415),
        ("text/plain;application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("application/json, text/plain", 415),
        (";", 415),
        ("text/json", 415),
    ],
)
@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE"])
def test_bodies_are_json_or_binary(content_type, expected, method):
    assert status(method=method, content_type=content_type) == expected
    assert status(method="GET", content_type=content_type) == 200


def test_curl_may_send_json_as_a_form_where_documents_do_but_no_browser():
    ollama = Policy(curl_paths=("/api/",))
    form = {"content_type": "application/x-www-form-urlencoded"}
    assert status(ollama, path="/api/chat", **form) == 200
    assert status(ollama, path="/v1/api/chat", **form) == 415
    assert status(ollama, path="/api/chat", content_type="text/plain") == 415
    own = {"origin": "http://127.0.0.1:1025", "sec_fetch_site": "same-origin"}
    for name, value in own.items():
        assert status(ollama, path="/api/chat", **form, **{name: value}) == 415
    assert status(ollama, path="/api/chat", **form, sec_fetch_site="cross-site") == 403


def test_the_sentence_says_what_to_do():
    assert refusal(Policy(), "POST", "/", {"content-type": "application/x-www-form-urlencoded"}) == Refusal(
        415,
        "a body of type application/x-www-form-urlencoded is not read; send it with Content-Type: application/json",
    )
    assert refusal(Policy(), "GET", "/", {"host": "a"}) == Refusal(
        421, "the host 'a' is not known here; --allowed-host NAME (allowedHosts in config.json) adds it"
    )
    assert refusal(Policy(), "GET", "/", {"origin": "https://b"}) == Refusal(
        403, "a page of https://b may not call this; corsOrigins of a server names those that may"
    )


@pytest.mark.parametrize("name", ["https://a", "a:80", "a b", "", 1, None, "*.", "a.*", "[::1]", "a/"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="must be a host name"):
        checked_hosts([name])


@pytest.mark.parametrize("origin", ["a.example", "https://a/", "https://*.a", "", 1, "https://u@a"])
def test_what_is_no_origin_is_refused(origin):
    with pytest.raises(ValueError, match="must be an origin"):
        checked_origins([origin])


def test_a_header_that_comes_twice_is_seen_whole():
    assert joined([("Host", "127.0.0.1"), ("host", "evil.example")]) == {"host": "127.0.0.1, evil.example"}
