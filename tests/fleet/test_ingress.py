"""The whole server in front of a fleet: its limit of requests, its metrics, its refusals. Without Ray."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import pytest

from kvloom.fleet.args import FleetArgs
from kvloom.fleet.engine import Way, Ways
from kvloom.fleet.ingress import Fleet, Ingress, share_of
from kvloom.fleet.lost import ReplicaLost
from kvloom.fleet.plan import make_plan
from kvloom.fleet.routing.board import Board, View
from kvloom.fleet.wire import About
from tests.fleet.fleets import INFO, Replicas

PLAN = make_plan(FleetArgs(backend="fake"))
ABOUT = About("r0", "w8a8", "1", "n", 1, 256, INFO)


@asynccontextmanager
async def serving(replicas: Replicas, plan=PLAN, num_failures: int = 0):
    """An ingress and a client of it. The first `num_failures` requests for a replica's description fail."""
    left = [num_failures]

    async def describe() -> About:
        left[0] -= 1
        if left[0] >= 0:
            raise ReplicaLost("none yet")
        return ABOUT

    board = Board()
    board.views = [View("r0")]
    ingress = Ingress(plan, Fleet(describe, Ways(Way(replicas.call, board))), "n")
    transport = httpx.ASGITransport(ingress.app())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        yield ingress, client
    await ingress.close(0)


def ask(client, **more):
    body = {"model": "mock", "prompt": "hello", "max_tokens": 4, "seed": 1, "temperature": 1, **more}
    return client.post("/v1/completions", json=body)


def test_before_a_replica_is_there_the_answer_is_503_and_then_it_is_200():
    async def run():
        async with serving(Replicas(), num_failures=1) as (ingress, client):
            early = await ask(client)
            await ingress.load()
            return early, await ask(client)

    early, answer = asyncio.run(run())
    assert (early.status_code, early.headers["retry-after"]) == (503, "2")
    assert answer.status_code == 200


def test_more_than_the_bound_is_429_and_says_when_to_come_again():
    bound = {"max_link_num": 1}
    plan = replace(PLAN, values=PLAN.values | bound)

    async def run():
        replicas = Replicas(is_silent=True)
        async with serving(replicas, plan) as (ingress, client):
            await ingress.load()
            waiting = [asyncio.create_task(ask(client)) for _ in range(3)]
            while ingress._models.num_active < 3:
                await asyncio.sleep(0)
            refused = await ask(client)
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
            return refused

    refused = asyncio.run(run())
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")


@pytest.mark.parametrize(("number", "links", "tokens"), [(1, 300, 1000), (2, 150, 500), (7, 43, 143)])
def test_several_ingresses_share_the_bound_of_one_server(number, links, tokens):
    config = replace(PLAN.config("n"), max_link_num=300, max_queued_tokens=1000)
    shared = share_of(config, number)
    assert (shared.max_link_num, shared.max_queued_tokens) == (links, tokens)


def test_moves_are_counted_in_metrics_and_told_in_the_consoles_feed():
    async def run():
        async with serving(Replicas([2])) as (ingress, client):
            await ingress.load()
            assert (await ask(client)).status_code == 200
            feed = (await client.get("/console/feed")).json()["models"][0]
            return feed, (await client.get("/metrics")).text

    feed, metrics = asyncio.run(run())
    assert (feed["moves"], feed["lost"], [each["name"] for each in feed["replicas"]]) == (1, 0, ["r0"])
    assert 'request_moves_total{model_name="mock"} 1.0' in metrics
    assert 'replica_ready{model_name="mock",node="",replica="r0"} 0.0' in metrics


def test_one_of_a_fleet_is_not_stopped_by_a_request():
    async def run():
        async with serving(Replicas()) as (_, client):
            return await client.post("/stopService")

    assert asyncio.run(run()).status_code == 403


def test_a_large_body_is_parsed_in_another_process():
    async def run():
        async with serving(Replicas()) as (ingress, client):
            await ingress.load()
            answer = await ask(client, prompt="x" * 500_000)
            await asyncio.to_thread(ingress._parsing.close)
            return answer

    answer = asyncio.run(run())
    assert answer.status_code == 400
    assert "maximum context length is 256 tokens" in answer.json()["error"]["message"]
