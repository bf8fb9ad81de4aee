"""The control plane: credentials, tenants, nodes, and agents that follow it."""

import sqlite3
from contextlib import ExitStack, closing
from typing import Any
from unittest.mock import Mock

import httpx
import msgspec
import pytest
from starlette.routing import Route
from starlette.testclient import TestClient

from ems import CcKvOption, EmsErrorCode, EmsException
from kvloom.pool.auth import node_token
from kvloom.pool.control.service import build_app
from kvloom.pool.control.state import Conflict, ControlState, Heartbeat, Orders
from kvloom.pool.node import NodeStats, PoolStats
from tests.support.pool.agents import SECRET, new_kv, running_agent, session, slots_of
from tests.support.pool.control import ADMIN, TOKEN, Clock
from tests.support.waiting import until


def test_a_wrong_token_is_refused(api):
    answer = api.get("/v1/credentials", headers={"Authorization": "Bearer no"})
    assert (answer.status_code, answer.json()["error_code"]) == (401, "EMS.0401")
    assert api.get("/v1/nodes", headers={"Authorization": ""}).status_code == 401


def test_a_token_may_hold_any_letters(state):
    with TestClient(build_app(state, "clé", SECRET)) as api:
        for token, status in (("clé", 200), ("cle", 401), ("clÉ", 401)):
            assert api.get("/v1/nodes", headers={b"Authorization": b"Bearer " + token.encode()}).status_code == status


@pytest.mark.parametrize("name", ["x" * 513, "é" * 600])
def test_a_tenants_name_that_is_too_long_is_refused(api, state, name):
    made = api.post("/v1/credentials", json={"access_id": "a", "tenant": name})
    for answer in (made, api.put(f"/v1/tenants/{name}", json={"quota_bytes": 1})):
        assert (answer.status_code, "tenant: must be 1 to 512 characters" in answer.text) == (400, True)
    assert (state.credentials(), state.tenants()) == ([], [])


def test_a_credential_is_issued_once_and_its_key_is_not_kept(api, state):
    made = api.post("/v1/credentials", json={"access_id": "team-a"})
    assert made.status_code == 201
    assert made.json()["tenant"] == "team-a"
    assert 32 <= len(made.json()["access_key"]) <= 256
    assert api.post("/v1/credentials", json={"access_id": "team-a"}).status_code == 409
    assert api.get("/v1/credentials").json() == {
        "credentials": [{"access_id": "team-a", "tenant": "team-a", "num_keys": 1}]
    }
    assert made.json()["access_key"] not in str(state.credentials())


@pytest.mark.parametrize("body", [{"access_id": "A"}, {}, {"access_id": "a", "x": 1}, [1]])
def test_a_wrong_body_is_refused(api, body):
    answer = api.post("/v1/credentials", json=body)
    assert (answer.status_code, answer.json()["error_code"]) == (400, "EMS.0400")


def test_a_rotation_overlaps_and_ends(api, state, clock):
    api.post("/v1/credentials", json={"access_id": "a"})
    api.post("/v1/credentials/a:rotate", json={"overlap_s": 60})
    assert len(state.credentials()[0]["verifiers"]) == 2
    clock.now_s += 61
    assert len(state.credentials()[0]["verifiers"]) == 1
    assert api.post("/v1/credentials/b:rotate").status_code == 404
    assert api.post("/v1/credentials/a:rotate", json={"overlap_s": -1}).status_code == 400


def test_a_revoked_credential_is_gone(api, state):
    api.post("/v1/credentials", json={"access_id": "a"})
    assert api.delete("/v1/credentials/a").status_code == 204
    assert api.delete("/v1/credentials/a").status_code == 404
    assert state.credentials() == []


def test_a_heartbeat_that_is_nested_too_deeply_is_refused(api):
    given = beat_of("a")
    answer = api.post("/v1/nodes/a:heartbeat", **{**given, "content": '{"x":' * 99_999})
    assert (answer.status_code, answer.json()["error_code"]) == (400, "EMS.0400")


@pytest.mark.parametrize("quota", [2**63, 10**30])
def test_a_quota_that_no_machine_has_is_refused(api, quota):
    answer = api.put("/v1/tenants/a", json={"quota_bytes": quota})
    assert (answer.status_code, answer.json()["error_code"]) == (400, "EMS.0400")


def test_a_full_disk_is_told_to_callers_and_nodes_and_ends_nothing(api, state, caplog):
    heard_of(state, "a")
    state._db.execute("PRAGMA query_only = ON")
    for answer in (
        api.put("/v1/tenants/t", json={"quota_bytes": 1}),
        api.post("/v1/nodes/a:heartbeat", **beat_of("a")),
    ):
        assert (answer.status_code, answer.json()["error_code"]) == (503, "EMS.0503")
        assert answer.json()["error_msg"].startswith("the control plane cannot keep its --state: ")
    assert "Traceback" not in caplog.text
    state._db.execute("PRAGMA query_only = OFF")
    assert api.post("/v1/nodes/a:heartbeat", **beat_of("a")).status_code == 200


def test_limits_of_a_tenant(api):
    body = {"quota_bytes": 100, "guarantee_bytes": 10}
    assert api.put("/v1/tenants/a", json=body).json() == {"tenant": "a", "used_bytes": 0, **body}
    assert api.put("/v1/tenants/a", json={"quota_bytes": 1, "guarantee_bytes": 2}).status_code == 400
    assert api.get("/v1/tenants/b").status_code == 404


def test_state_survives_a_restart(tmp_path, clock):
    with closing(ControlState(tmp_path / "control.db", clock)) as state:
        state.issue("a", "t")
        state.set_tenant("t", 1, 2)
        before = state.credentials()
    with closing(ControlState(tmp_path / "control.db", clock)) as state:
        assert state.credentials() == before
        assert state.tenants()[0]["quota_bytes"] == 2


def heard_of(state, *node_ids) -> list[Orders]:
    """The orders with which the control plane answers each node's heartbeat."""
    return [state.heartbeat(node_id, Heartbeat(f"{node_id}:1", NodeStats(node_id, [], {}))) for node_id in node_ids]


def beat_of(node_id: str, address: str = "10.0.0.1:1", pools: list[PoolStats] | None = None) -> dict[str, Any]:
    """The body and headers of a heartbeat, as a node sends it."""
    headers = {"Authorization": f"Bearer {node_token(SECRET)}", "Content-Type": "application/json"}
    beat = Heartbeat(address, NodeStats(node_id, pools or [], {}))
    return {"content": msgspec.json.encode(beat), "headers": headers}


def test_nodes_are_told_who_is_drained_until_it_is_no_more(api, state):
    heard_of(state, "a", "b")
    api.post("/v1/nodes/b:drain")
    for orders in heard_of(state, "a", "b"):
        assert (orders.draining, sorted(orders.members)) == (["b"], ["a", "b"])
    api.post("/v1/nodes/b:undrain")
    assert [orders.draining for orders in heard_of(state, "a", "b")] == [[], []]


@pytest.mark.parametrize("jump_s", [-7200, 7200])
def test_who_is_alive_is_no_matter_of_the_time_of_day(state, clock, jump_s):
    heard_of(state, "a", "b")
    clock.now_s += jump_s
    (orders,) = heard_of(state, "a")
    assert sorted(orders.members) == ["a", "b"]


def test_nodes_that_are_silent_are_left_out(clock):
    steady = Clock()
    with closing(ControlState(":memory:", clock, steady)) as state:
        heard_of(state, "a", "b")
        steady.now_s += 11
        assert [sorted(orders.members) for orders in heard_of(state, "a", "b")] == [["a"], ["a", "b"]]


def test_a_control_plane_that_was_away_tells_the_first_node_of_those_that_were_there(tmp_path, clock):
    steady = Clock()
    with closing(ControlState(tmp_path / "control.db", clock, steady)) as state:
        heard_of(state, "long gone")
        clock.now_s, steady.now_s = clock.now_s + 60, steady.now_s + 60
        heard_of(state, "a", "b")
    clock.now_s += 3600
    steady.now_s = 5.0  # the control plane restarts on another machine, with another monotonic clock
    with closing(ControlState(tmp_path / "control.db", clock, steady)) as state:
        assert sorted(heard_of(state, "a")[0].members) == ["a", "b"]
        steady.now_s += 11
        assert sorted(heard_of(state, "a")[0].members) == ["a"]


@pytest.mark.parametrize("jump_s", [-7200, 7200])
def test_a_control_plane_whose_clock_was_set_before_its_restart_knows_those_that_were_there(tmp_path, clock, jump_s):
    steady = Clock()
    with closing(ControlState(tmp_path / "control.db", clock, steady)) as state:
        heard_of(state, "long gone")
        clock.now_s, steady.now_s = clock.now_s + 60, steady.now_s + 60
        heard_of(state, "a")
        clock.now_s, steady.now_s = clock.now_s + jump_s, steady.now_s + 1
        heard_of(state, "b")
    for _restart in range(2):
        clock.now_s += jump_s
        with closing(ControlState(tmp_path / "control.db", clock, steady)) as state:
            assert sorted(heard_of(state, "a")[0].members) == ["a", "b"]


def test_of_two_agents_with_one_id_the_later_is_the_node_until_it_is_silent(clock):
    steady = Clock()

    def beat(incarnation):
        return state.heartbeat("a", Heartbeat(f"{incarnation}:1", NodeStats("a", [], {}), incarnation)).members["a"]

    with closing(ControlState(":memory:", clock, steady)) as state:
        assert [beat("first"), beat("later"), beat("later")] == ["first:1", "later:1", "later:1"]
        with pytest.raises(Conflict, match=r"agent at later:1 started later and calls itself a too; give .*--node-id"):
            beat("first")
        assert beat("later") == "later:1"
        steady.now_s += 11
        assert beat("first") == "first:1"
        with pytest.raises(Conflict):
            beat("later")


def test_an_agent_whose_id_is_anothers_says_so(served, caplog):
    with ExitStack() as stack:
        one, other = (controlled(stack, served.base_url, "a") for _ in range(2))
        assert other._control.beat()
        assert not one._control.beat()
    assert f"the agent at 127.0.0.1:{other.peer_port} started later and calls itself a too" in caplog.text


@pytest.mark.parametrize("address", ["nowhere", "0.0.0.0:9300", "[::]:9300", "10.0.0.1:0"])
def test_an_address_that_nobody_can_call_is_told_to_nobody(api, state, address):
    heard_of(state, "a")
    answer = api.post("/v1/nodes/b:heartbeat", **beat_of("b", address))
    assert (answer.status_code, answer.json()["error_msg"].partition(":")[0]) == (400, "address")
    assert list(heard_of(state, "a")[0].members) == ["a"]


def test_a_node_of_many_tenants_is_heard(api, state):
    pools = [PoolStats(f"tenant-{n}", {}, dict.fromkeys(map(str, range(200)), n)) for n in range(1500)]
    assert api.post("/v1/nodes/b:heartbeat", **beat_of("b", pools=pools)).status_code == 200
    assert len(state.tenants()) == 1500


def test_an_order_to_evict_names_a_tenant_and_makes_no_pool(api, state):
    heard_of(state, "a")
    answer = api.post("/v1/nodes/a/blocks:evict", json={"tenant": "t" * 70_000, "bytes": 1})
    assert (answer.status_code, "tenant: must be 1 to 512 characters" in answer.text) == (400, True)
    with running_agent() as agent:
        assert (agent.node.evict("nobody", 1), agent.node.pools()) == (None, [])


def test_a_node_is_told_once_what_to_evict(api, state):
    heard_of(state, "a", "b")
    for size in (5, 6):
        assert api.post("/v1/nodes/a/blocks:evict", json={"tenant": "t", "bytes": size}).status_code == 202
    assert [orders.evict for orders in heard_of(state, "b", "a", "a")] == [[], [("t", 5), ("t", 6)], []]


def test_what_a_node_is_to_evict_waits_for_an_answer_that_can_be_given(api, state, monkeypatch):
    heard_of(state, "a")
    api.post("/v1/nodes/a/blocks:evict", json={"tenant": "t", "bytes": 5})
    with monkeypatch.context() as full:
        full.setattr(state, "credentials", Mock(side_effect=sqlite3.OperationalError("database or disk is full")))
        assert api.post("/v1/nodes/a:heartbeat", **beat_of("a")).status_code == 503
    assert heard_of(state, "a")[0].evict == [("t", 5)]


def controlled(stack, url, name, **changes):
    options = {"node_id": name, "is_open": False, "secret": SECRET, "control_url": str(url), **changes}
    return stack.enter_context(running_agent(listen=("127.0.0.1", 0), http=("127.0.0.1", 0), **options))


def test_agents_follow_the_control_plane(served):
    key = served.post("/v1/credentials", json={"access_id": "team-a"}).json()["access_key"]
    other = served.post("/v1/credentials", json={"access_id": "team-b"}).json()["access_key"]
    served.put("/v1/tenants/team-a", json={"quota_bytes": 1 << 20})
    kv = new_kv()
    with ExitStack() as stack:
        a, b = (controlled(stack, served.base_url, name) for name in ("a", "b"))
        for agent in (a, b, a):
            assert agent._control.beat()
        assert list(a.peers.status()) == ["b"]
        cc = stack.enter_context(session(a.config.socket, kv, access_id="team-a", access_key=key))
        assert cc.save(slots_of(*range(30)), list(range(30)), [4] * 30).success == 30
        assert a.node.pool("team-a").usage()["quota_bytes"] == 1 << 20
        cc_b = stack.enter_context(session(a.config.socket, kv, access_id="team-b", access_key=other))
        assert cc_b.exists([0]) == 0, "another tenant"
        served.post("/v1/nodes/b:drain")
        assert a._control.beat()
        assert b._control.beat()
        assert cc.save(slots_of(*range(30)), list(range(50, 80)), [4] * 30).success == 30
        assert cc.exists(list(range(50, 80)), CcKvOption(read_local_only=True)) == 30

        def blocks_after_eviction() -> int:  # blocks stay until their push to the home node is done
            served.post("/v1/nodes/a/blocks:evict", json={"tenant": "team-a", "bytes": 1 << 30})
            assert a._control.beat()
            return a.node.pool("team-a").usage()["blocks"]

        until(lambda: blocks_after_eviction() == 0)
        text = served.get("/metrics").text
        assert 'ems_load_keys_total{node="a",tenant="team-a"}' in text
        local = httpx.get(f"http://127.0.0.1:{a.http_port}/metrics").text
        assert 'ems_saves_total{node="a",status="stored",tenant="team-a"}' in local
        served.delete("/v1/credentials/team-a")
        assert a._control.beat()
        with pytest.raises(EmsException) as caught:
            cc.save(slots_of(0), [1], [4])
        assert caught.value.status_code() == EmsErrorCode.EMS_IO_ERROR


def test_a_session_ends_with_its_key_and_those_of_the_new_key_go_on(served):
    old = served.post("/v1/credentials", json={"access_id": "a"}).json()["access_key"]
    with ExitStack() as stack:
        agent = controlled(stack, served.base_url, "a")

        def opened_with(key):
            assert agent._control.beat()
            return stack.enter_context(session(agent.config.socket, new_kv(), access_id="a", access_key=key))

        before = opened_with(old)
        assert before.save(slots_of(0), [1], [4]).success == 1
        new = served.post("/v1/credentials/a:rotate", json={"overlap_s": 0}).json()["access_key"]
        after = opened_with(new)
        with pytest.raises(EmsException) as caught:
            before.save(slots_of(0), [2], [4])
        assert caught.value.status_code() == EmsErrorCode.EMS_IO_ERROR
        assert after.exists([1, 2]) == 1


def test_agents_go_on_without_the_control_plane(served):
    key = served.post("/v1/credentials", json={"access_id": "a"}).json()["access_key"]
    kv = new_kv()
    with ExitStack() as stack:
        agent = controlled(stack, served.base_url, "a")
        assert agent._control.beat()
        object.__setattr__(agent.config, "control_url", "http://127.0.0.1:9")
        assert not agent._control.beat()
        cc = stack.enter_context(session(agent.config.socket, kv, access_id="a", access_key=key))
        assert cc.save(slots_of(0), [1], [4]).success == 1


def test_a_node_that_restarts_without_the_control_plane_knows_what_it_was_told(served, tmp_path):
    key = served.post("/v1/credentials", json={"access_id": "a"}).json()["access_key"]
    served.put("/v1/tenants/a", json={"quota_bytes": 1 << 20})
    kept = tmp_path / "orders"
    with ExitStack() as stack:
        assert controlled(stack, served.base_url, "a", state=kept)._control.beat()
    assert kept.stat().st_mode & 0o777 == 0o600
    assert key.encode() not in kept.read_bytes()
    nowhere = "http://127.0.0.1:9"
    with ExitStack() as stack:
        agent = controlled(stack, nowhere, "a", state=kept)
        cc = stack.enter_context(session(agent.config.socket, new_kv(), access_id="a", access_key=key))
        assert cc.save(slots_of(0), [1], [4]).success == 1
        assert agent.node.pool("a").usage()["quota_bytes"] == 1 << 20
    damaged = bytearray(kept.read_bytes())
    damaged[-3] ^= 1
    kept.write_bytes(damaged)
    with ExitStack() as stack:
        agent = controlled(stack, nowhere, "a", state=kept)
        cc = stack.enter_context(session(agent.config.socket, new_kv(), access_id="a", access_key=key))
        with pytest.raises(EmsException, match="wrong"):
            cc.save(slots_of(0), [1], [4])


def test_what_cannot_be_kept_is_counted(served, tmp_path):
    (tmp_path / "none").write_text("no folder")
    with ExitStack() as stack:
        agent = controlled(stack, served.base_url, "a", state=tmp_path / "none" / "orders")
        assert agent._control.beat(), "the node goes on"
        assert agent.node.counts["state_failures"] > 0


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Origin": "https://evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Host": "evil.example", "Authorization": ""}, 421),
    ],
)
def test_no_route_of_the_control_plane_answers_a_page_of_another_site(api, state, headers, status):
    if status == 421:
        api.headers.pop("Authorization")
        headers = {"Host": "evil.example"}
    routes = [route for route in api.app.routes if isinstance(route, Route)]
    assert len(routes) > 10
    for route in routes:
        for method in route.methods:
            if status == 415 and method in ("GET", "HEAD"):
                continue
            path = route.path.format(access_id="a", tenant="a", node_id="a")
            answer = api.request(method, path, headers=headers, content=b'{"access_id": "a"}')
            assert answer.status_code == status, (method, path)
            assert method == "HEAD" or answer.json()["error_code"] == f"EMS.0{status}"
    assert state.credentials() == []


def test_the_control_plane_answers_under_a_name_to_who_shows_a_token_or_when_it_is_allowed(state):
    with TestClient(build_app(state, TOKEN, SECRET), base_url="http://control.svc") as api:
        assert api.get("/v1/nodes", headers=ADMIN).status_code == 200
        assert api.get("/healthz").status_code == 421
    with TestClient(build_app(state, TOKEN, SECRET, frozenset({"*.svc"})), base_url="http://control.svc") as api:
        assert api.get("/healthz").status_code == 200


def test_a_nodes_own_figures_are_not_for_pages_of_other_sites():
    with running_agent(http=("127.0.0.1", 0), allowed_hosts=frozenset({"node.example"})) as agent:
        url = f"http://127.0.0.1:{agent.http_port}"
        for path in ("/healthz", "/stats", "/metrics"):
            assert httpx.get(url + path).status_code == 200
            assert httpx.get(url + path, headers={"Host": "node.example:9400"}).status_code == 200
            assert httpx.get(url + path, headers={"Host": "evil.example"}).status_code == 421
            assert httpx.get(url + path, headers={"Sec-Fetch-Site": "cross-site"}).status_code == 403
            assert httpx.post(url + path, json={}).status_code == 501
