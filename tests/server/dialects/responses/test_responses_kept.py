"""/v1/responses and /v1/conversations with a store (kept, continued, listed, cancelled, deleted), and without one."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvloom.rank.fake import FakeRunner
from kvloom.server.dialects.responses import keeping as responses_keeping
from kvloom.server.keeping.limits import Limits
from kvloom.server.keeping.store import ResponseStore
from tests.support.servers import FakeServer, fake_server
from tests.support.waiting import until
from tests.support.wire.responses import GREEDY, PATH, refusal, respond, text_of, truth

KEYS = ("kvl-0123456789abcdef0123456789abcdef", "kvl-fedcba9876543210fedcba9876543210")


# -- responses


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_is_kept_unless_it_says_otherwise(keeping: FakeServer, stream: bool):
    answer = respond(keeping, "hello", stream=stream, metadata={"a": "b"})
    assert answer["store"] is True
    assert keeping.client.get(f"{PATH}/{answer['id']}").json() == answer
    other = respond(keeping, "hello", stream=stream, store=False)
    assert other["store"] is False
    error = refusal(keeping.client.get(f"{PATH}/{other['id']}"), 404)
    assert (error["message"], error["code"]) == (f"Response with id '{other['id']}' not found.", None)


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_goes_on_from_another_without_its_instructions(keeping: FakeServer, stream: bool):
    first = respond(keeping, "one", instructions="Be brief.", stream=stream)
    said = [("user", "one"), ("assistant", text_of(first))]
    second = respond(keeping, "two", previous_response_id=first["id"], stream=stream)
    assert second["previous_response_id"] == first["id"]
    assert text_of(second) == truth(*said, ("user", "two"))
    third = respond(keeping, [{"role": "user", "content": "three"}], previous_response_id=second["id"], store=False)
    assert text_of(third) == truth(*said, ("user", "two"), ("assistant", text_of(second)), ("user", "three"))
    again = respond(keeping, "other", previous_response_id=first["id"], instructions="Rhyme.")
    assert text_of(again) == truth(("system", "Rhyme."), *said, ("user", "other"))


def test_two_responses_go_on_from_one_at_the_same_time(keeping: FakeServer):
    first = respond(keeping, "one")
    with ThreadPoolExecutor(8) as threads:
        asked = [f"question {i}" for i in range(8)]
        found = list(threads.map(lambda text: respond(keeping, text, previous_response_id=first["id"]), asked))
    said = (("user", "one"), ("assistant", text_of(first)))
    assert [text_of(answer) for answer in found] == [truth(*said, ("user", text)) for text in asked]


def test_an_error_names_the_item_of_the_body_and_nothing_before_it(keeping: FakeServer):
    first = respond(keeping, "one")
    body = {**GREEDY, "previous_response_id": first["id"], "input": [{"role": "user", "content": "a"}, {"role": None}]}
    assert refusal(keeping.post(PATH, body))["param"] == "input[1].role"


def test_what_is_not_there_cannot_be_gone_on_from(keeping: FakeServer):
    error = refusal(keeping.post(PATH, {**GREEDY, "input": "a", "previous_response_id": "resp_1"}))
    assert (error["param"], error["code"]) == ("previous_response_id", "previous_response_not_found")
    assert "not found" in error["message"]
    error = refusal(keeping.post(PATH, {**GREEDY, "input": "a", "conversation": "conv_1"}))
    assert error["param"] == "conversation"
    both = {"previous_response_id": "resp_1", "conversation": {"id": "conv_1"}}
    assert refusal(keeping.post(PATH, {**GREEDY, "input": "a", **both}))["message"].endswith("give one")
    first = respond(keeping, "one")
    second = respond(keeping, "two", previous_response_id=first["id"])
    assert keeping.client.delete(f"{PATH}/{first['id']}").json() == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    refusal(keeping.client.delete(f"{PATH}/{first['id']}"), 404)
    error = refusal(keeping.post(PATH, {**GREEDY, "input": "a", "previous_response_id": second["id"]}))
    assert (error["code"], first["id"] in error["message"]) == ("previous_response_not_found", True)


def test_a_long_past_is_refused_or_loses_its_oldest(keeping: FakeServer, monkeypatch: pytest.MonkeyPatch):
    first = respond(keeping, "one")
    second = respond(keeping, "x" * 1500, previous_response_id=first["id"])
    body = {**GREEDY, "input": "y" * 800, "previous_response_id": second["id"]}
    assert refusal(keeping.post(PATH, body))["param"] == "input"
    answer = respond(keeping, "y" * 800, previous_response_id=second["id"], truncation="auto")
    assert text_of(answer) == truth(("assistant", text_of(second)), ("user", "y" * 800))
    monkeypatch.setattr(responses_keeping, "MAX_PAST_BYTES", 1000)
    error = refusal(keeping.post(PATH, {**body, "input": "a"}))
    assert error["message"].startswith("previous_response_id: leads to more than 1000 bytes")
    assert respond(keeping, "a", previous_response_id=second["id"], truncation="auto")["status"] == "incomplete"


def test_calls_reasoning_and_results_are_gone_on_from(keeping: FakeServer):
    items = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ]
    first = respond(keeping, items)
    listed = keeping.client.get(f"{PATH}/{first['id']}/input_items?order=asc").json()["data"]
    assert [item["type"] for item in listed] == ["message", "reasoning", "function_call", "function_call_output"]
    assert [item["id"].partition("_")[0] for item in listed] == ["msg", "rs", "fc", "fco"]
    go = {"role": "user", "content": "go"}
    by_hand = respond(keeping, [*items, *first["output"], go])
    assert text_of(respond(keeping, [go], previous_response_id=first["id"])) == text_of(by_hand)


def test_input_items_are_listed_a_page_at_a_time(keeping: FakeServer):
    items = [{"role": ("user", "assistant")[i % 2], "content": f"text {i}"} for i in range(5)]
    path = f"{PATH}/{respond(keeping, items)['id']}/input_items"
    first = keeping.client.get(f"{path}?limit=3").json()
    assert [item["content"][0]["text"] for item in first["data"]] == ["text 4", "text 3", "text 2"]
    assert (first["object"], first["has_more"]) == ("list", True)
    assert first["last_id"] == first["data"][-1]["id"]
    rest = keeping.client.get(f"{path}?limit=3&after={first['last_id']}").json()
    assert [item["content"][0]["text"] for item in rest["data"]] == ["text 1", "text 0"]
    assert rest["has_more"] is False
    assert {item["content"][0]["type"] for item in first["data"]} == {"input_text", "output_text"}
    for query, param in (("limit=0", "limit"), ("limit=101", "limit"), ("limit=a", "limit"), ("order=up", "order")):
        assert refusal(keeping.client.get(f"{path}?{query}"))["param"] == param
    assert refusal(keeping.client.get(f"{path}?after=msg_1"))["param"] == "after"
    refusal(keeping.client.get(f"{PATH}/resp_1/input_items"), 404)


def test_a_running_response_is_told_of_and_cancelled(store: ResponseStore):
    with fake_server(store=store, has_eos=False, step_s=0.01) as server:
        body = {**GREEDY, "input": "a", "max_output_tokens": 1500, "stream": True}
        with server.client.stream("POST", PATH, json=body) as response:
            lines = response.iter_lines()
            created = json.loads(next(line for line in lines if line.startswith("data: "))[6:])["response"]
            one = f"{PATH}/{created['id']}"
            assert server.client.get(one).json()["status"] == "in_progress"
            assert "still running" in refusal(server.client.delete(one))["message"]
            cancelled = server.post(f"{one}/cancel").json()
            assert (cancelled["id"], cancelled["status"]) == (created["id"], "cancelled")
            last = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])["response"]
        assert (last["status"], last["output"][0]["status"]) == ("cancelled", "incomplete")
        assert 0 < last["usage"]["output_tokens"] < 1500
        assert server.client.get(one).json() == last
        assert refusal(server.post(f"{one}/cancel"))["message"].endswith("its status is cancelled")
    with fake_server(has_eos=False, step_s=0.01) as server, server.client.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()
        created = json.loads(next(line for line in lines if line.startswith("data: "))[6:])["response"]
        assert server.post(f"{PATH}/{created['id']}/cancel").status_code == 200  # without a store as well


@pytest.mark.parametrize("is_streamed", [True, False])
def test_what_a_client_leaves_behind_is_kept_as_it_is(tmp_path: Path, is_streamed: bool):
    store = ResponseStore(tmp_path / "store.db")
    with fake_server(store=store, has_eos=False, step_s=0.01) as server:
        body = {**GREEDY, "input": "a", "max_output_tokens": 1500, "stream": is_streamed}
        if is_streamed:
            with server.client.stream("POST", PATH, json=body) as response:
                next(response.iter_lines())
        else:
            server.leave(PATH, body)
        until(lambda: server.engine.stats().num_running == 0)
        rows = until_found(store)
    store.close()
    [kept] = [json.loads(row) for row in rows]
    assert (kept["status"], kept["output"][0]["status"]) == ("cancelled", "incomplete")
    assert kept["usage"]["output_tokens"] > 0


def until_found(store: ResponseStore) -> list[bytes]:
    """Polls until entries exist, then returns the bodies of all of them."""

    def read() -> list[bytes]:
        query = "SELECT body FROM entries"
        return [row[0] for row in store._thread.submit(lambda: store._database._db.execute(query).fetchall()).result()]

    until(lambda: bool(read()))
    return read()


def test_a_model_that_fails_in_the_middle_leaves_a_failed_response(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run, steps = FakeRunner.run, []

    def failing(runner: FakeRunner, batch: Any) -> Any:
        steps.append(batch)
        if len(steps) == 5:
            raise RuntimeError("a kernel broke")
        return run(runner, batch)

    monkeypatch.setattr(FakeRunner, "run", failing)
    store = ResponseStore(tmp_path / "store.db")
    with fake_server(store=store) as server:
        answer = respond(server, "a", stream=True)
        assert answer["status"] == "failed"
        assert server.client.get(f"{PATH}/{answer['id']}").json() == answer
    store.close()


def test_an_answer_that_cannot_be_kept_is_given_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = ResponseStore(tmp_path / "store.db", Limits(max_bytes=4000))
    with fake_server(store=store) as server:
        small = respond(server, "a")
        assert small["store"] is True
        for stream in (True, False):
            answer = respond(server, "a" * 1500, stream=stream, metadata={str(i): "x" * 500 for i in range(6)})
            assert (answer["store"], len(text_of(answer))) == (False, 8)
        assert "is not kept: " in caplog.text
        assert server.client.get(f"{PATH}/{small['id']}").json() == small
        store._thread.submit(lambda: store._database._db.execute("PRAGMA query_only = ON").fetchall()).result()
        assert respond(server, "a")["store"] is False
        store._thread.submit(store._database._db.close).result()
        assert respond(server, "a")["store"] is False
        error = refusal(server.client.get(f"{PATH}/{small['id']}"), 503)
        assert error["message"].startswith("the store of responses failed: ")
        assert refusal(server.post(PATH, {**GREEDY, "input": "a", "previous_response_id": small["id"]}), 503)
    store._thread.shutdown()


# -- conversations


def test_a_conversation_gathers_what_is_asked_and_answered(keeping: FakeServer):
    first = [{"role": "user", "content": "before"}, {"role": "assistant", "content": "yes"}]
    made = keeping.post("/v1/conversations", {"metadata": {"a": "b"}, "items": first}).json()
    assert (made["object"], made["metadata"], made["id"][:5]) == ("conversation", {"a": "b"}, "conv_")
    said = [("user", "before"), ("assistant", "yes")]
    for text, chosen, is_kept in (("one", made["id"], True), ("two", {"id": made["id"]}, False)):
        answer = respond(keeping, text, conversation=chosen, store=is_kept, stream=is_kept)
        said.append(("user", text))
        assert (answer["conversation"], text_of(answer)) == ({"id": made["id"]}, truth(*said))
        said.append(("assistant", text_of(answer)))
    path = f"/v1/conversations/{made['id']}/items"
    listed = keeping.client.get(f"{path}?order=asc").json()["data"]
    assert [(item["role"], item["content"][0]["text"]) for item in listed] == said
    one = keeping.client.get(f"{path}/{listed[0]['id']}").json()
    assert one == listed[0]
    assert keeping.client.delete(f"{path}/{listed[0]['id']}").json() == made
    refusal(keeping.client.get(f"{path}/{listed[0]['id']}"), 404)
    refusal(keeping.client.delete(f"{path}/{listed[0]['id']}"), 404)
    added = keeping.post(path, {"items": [{"role": "developer", "content": "Rhyme."}]}).json()["data"]
    assert keeping.client.get(f"{path}?limit=1").json()["data"] == added
    assert len(keeping.client.get(path).json()["data"]) == 6


def test_conversations_are_changed_and_deleted(keeping: FakeServer):
    made = keeping.client.post("/v1/conversations").json()
    path = f"/v1/conversations/{made['id']}"
    assert keeping.client.get(path).json() == made
    changed = keeping.post(path, {"metadata": {"topic": "tea"}}).json()
    assert changed == {**made, "metadata": {"topic": "tea"}}
    assert keeping.client.get(path).json() == changed
    assert keeping.client.delete(path).json() == {"id": made["id"], "object": "conversation.deleted", "deleted": True}
    for response in (
        keeping.client.get(path),
        keeping.client.delete(path),
        keeping.post(path, {"metadata": None}),
        keeping.client.get(f"{path}/items"),
        keeping.post(f"{path}/items", {"items": [{"role": "user", "content": "a"}]}),
    ):
        assert refusal(response, 404)["message"] == f"Conversation with id '{made['id']}' not found."


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": [{"role": "user", "content": "a"}] * 21}, "items"),
        ({"items": [{"type": "compaction"}]}, "items[0].type"),
        ({"items": [{"role": "user", "content": [{"type": "input_image"}]}]}, "items[0].content[0].image_url"),
        ({"items": [{"role": 3}]}, "items"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata[...]"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "metadata"),
    ],
)
def test_bad_conversations_are_named(keeping: FakeServer, body: dict[str, Any], param: str):
    assert refusal(keeping.post("/v1/conversations", body))["param"] == param


def test_answers_of_one_conversation_do_not_mix(keeping: FakeServer):
    made = keeping.client.post("/v1/conversations").json()
    with ThreadPoolExecutor(6) as threads:
        list(threads.map(lambda i: respond(keeping, f"question {i}", conversation=made["id"]), range(6)))
    listed = keeping.client.get(f"/v1/conversations/{made['id']}/items?order=asc&limit=100").json()["data"]
    assert [item["role"] for item in listed] == ["user", "assistant"] * 6
    assert len({item["content"][0]["text"] for item in listed[::2]}) == 6


def test_a_conversation_that_goes_meanwhile_costs_no_answer(store: ResponseStore):
    with fake_server(store=store, has_eos=False, step_s=0.01) as server:
        made = server.client.post("/v1/conversations").json()
        body = {**GREEDY, "input": "a", "max_output_tokens": 50, "stream": True, "conversation": made["id"]}
        with server.client.stream("POST", PATH, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            assert server.client.delete(f"/v1/conversations/{made['id']}").status_code == 200
            last = json.loads([line for line in lines if line.startswith("data: ")][-1][6:])["response"]
        assert last["usage"]["output_tokens"] == 50
        assert server.client.get(f"{PATH}/{last['id']}").json() == last


# -- tenants, and no store


def test_tenants_do_not_see_each_other(tmp_path: Path):
    store = ResponseStore(tmp_path / "store.db")
    with fake_server(store=store, keys=KEYS, has_eos=False, step_s=0.005) as server:
        mine, other = ({"headers": {"Authorization": f"Bearer {key}"}} for key in KEYS)
        answer = server.post(PATH, {**GREEDY, "input": "a"}, **mine).json()
        made = server.post("/v1/conversations", {"items": [{"role": "user", "content": "b"}]}, **mine).json()
        one, conversation = f"{PATH}/{answer['id']}", f"/v1/conversations/{made['id']}"
        for path in (one, f"{one}/input_items", conversation, f"{conversation}/items"):
            assert server.client.get(path, **mine).status_code == 200
            refusal(server.client.get(path, **other), 404)
        for path in (one, conversation):
            refusal(server.client.delete(path, **other), 404)
        for past in ({"previous_response_id": answer["id"]}, {"conversation": made["id"]}):
            refusal(server.post(PATH, {**GREEDY, "input": "a", **past}, **other))
            assert server.post(PATH, {**GREEDY, "input": "a", **past}, **mine).status_code == 200
        body = {**GREEDY, "input": "a", "max_output_tokens": 1500, "stream": True}
        with server.client.stream("POST", PATH, json=body, **mine) as response:
            lines = response.iter_lines()
            running = json.loads(next(line for line in lines if line.startswith("data: "))[6:])["response"]
            refusal(server.client.get(f"{PATH}/{running['id']}", **other), 404)
            refusal(server.post(f"{PATH}/{running['id']}/cancel", **other), 404)
            assert server.post(f"{PATH}/{running['id']}/cancel", **mine).status_code == 200
    store.close()


def test_without_a_store_all_of_it_says_how_to_have_one(server: FakeServer):
    asked = [
        server.post(PATH, {**GREEDY, "input": "a", "previous_response_id": "resp_1"}),
        server.post(PATH, {**GREEDY, "input": "a", "conversation": "conv_1"}),
        server.client.get(f"{PATH}/resp_1"),
        server.client.delete(f"{PATH}/resp_1"),
        server.post(f"{PATH}/resp_1/cancel"),
        server.client.get(f"{PATH}/resp_1/input_items"),
        server.post("/v1/conversations", {}),
        server.client.get("/v1/conversations/conv_1"),
        server.client.get("/v1/conversations/conv_1/items/msg_1"),
    ]
    for response in asked:
        assert "start the server with --response-store FILE" in refusal(response)["message"]
    assert respond(server, "a", store=True)["store"] is False
    assert refusal(server.client.get(f"{PATH}/resp_1?stream=true"))["param"] == "stream"


def test_what_is_kept_outlives_the_server(tmp_path: Path):
    answers = []
    for _ in range(2):
        store = ResponseStore(tmp_path / "store.db")
        with fake_server(store=store) as server:
            past = {"previous_response_id": answers[-1]["id"]} if answers else {}
            answers.append(respond(server, "again", **past))
        store.close()
    first, second = answers
    said = (("user", "again"), ("assistant", text_of(first)), ("user", "again"))
    assert text_of(second) == truth(*said)
