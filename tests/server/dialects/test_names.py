"""Model names with slashes and arbitrary request ids, on every route that takes them in its path or body."""

import re
import threading

import httpx
import pytest

from kvloom.server.secure.api_keys import AccessError, check_bind
from tests.support.servers import fake_server
from tests.support.waiting import until

NAME = "org/Model-1.5"


@pytest.fixture(scope="module")
def server():
    with fake_server(names=(NAME,)) as server:
        yield server


@pytest.mark.parametrize("version", ["", "/versions/1"])
@pytest.mark.parametrize("path", ["", "/ready", "/config", "/getSlotCount", "/stats"])
def test_a_model_with_a_slash_in_its_name_has_every_get_route(server, version, path):
    answer = httpx.get(f"{server.url}/v2/models/{NAME}{version}{path}")
    assert answer.status_code == 200
    assert path not in ("", "/config") or NAME in answer.text


@pytest.mark.parametrize("version", ["", "/versions/1"])
def test_a_model_with_a_slash_in_its_name_generates(server, version):
    body = {"text_input": "hi", "parameters": {"max_new_tokens": 2}}
    for path in ("generate", "generate_stream"):
        answer = server.post(f"/v2/models/{NAME}{version}/{path}", body)
        assert (answer.status_code, NAME in answer.text) == (200, True)
    assert httpx.get(f"{server.url}/v1/models/{NAME}").json()["id"] == NAME


def test_another_name_is_not_served_under_a_part_of_it(server):
    for name in ("org", "Model-1.5", "org/other", f"{NAME}/more"):
        assert httpx.get(f"{server.url}/v2/models/{name}/ready").status_code == 404, name


def test_a_request_with_any_id_can_be_stopped():
    with fake_server(names=(NAME,), step_s=0.01, has_eos=False) as server:
        path, identity = f"/v2/models/{NAME}", "user:42 / " + "x" * 300
        found: list[httpx.Response] = []
        body = {"id": identity, "text_input": "hi", "parameters": {"max_new_tokens": 1500}}
        asking = threading.Thread(target=lambda: found.append(server.post(path + "/generate", body)))
        asking.start()
        until(lambda: server.post(path + "/stopInfer", {"id": identity}).status_code == 200)
        asking.join()
        assert (found[0].status_code, found[0].json()["id"]) == (200, identity)
        assert server.post(path + "/stopInfer", {"id": identity}).status_code == 422
        assert server.post(path + "/stopInfer", {"id": "gone"}).status_code == 404


def test_limits_are_told_in_full(server):
    told = server.post("/generate", {"prompt": "hi", "top_k": 2**31}).text
    assert re.search(r"between -?\d+ and 2147483647, got 2147483648", told), told


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_names_and_addresses_are_listened_on(host):
    check_bind(host, is_all_allowed=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0"])
def test_all_networks_are_refused_however_they_are_written(host):
    with pytest.raises(AccessError, match="listens on every network"):
        check_bind(host, is_all_allowed=False)
    check_bind(host, is_all_allowed=True)


def test_a_host_that_nobody_knows_is_named():
    with pytest.raises(AccessError, match="managementIpAddress must be an IP address or a name that is known here"):
        check_bind("no.such.host.invalid", False, "managementIpAddress")
