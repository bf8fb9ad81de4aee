"""`build`: the fleet as an application of Ray Serve, for `serve run`, `serve deploy` and KubeRay alike.

Only this module, router.py and local.py import Ray.
"""

import warnings
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

import msgspec
import ray
from ray import serve
from ray.exceptions import RayError, RayTaskError
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from kvloom.contract.errors import ModelError, ServingError
from kvloom.fleet.agent import NodeAgent
from kvloom.fleet.args import Autoscaling, DecodeScaling, FleetArgs, Scaling, parse_args
from kvloom.fleet.engine import Way, Ways
from kvloom.fleet.ingress import Fleet, Ingress
from kvloom.fleet.lost import Call, ReplicaLost
from kvloom.fleet.plan import Plan, make_plan, refusal
from kvloom.fleet.replica import EngineReplica
from kvloom.fleet.routing.board import board_of
from kvloom.fleet.scaling import MAILBOXES, METRIC
from kvloom.fleet.wire import About, decode_about, encode

ENGINES, PREFILL, INGRESS = "engines", "prefill", "ingress"
_NAMESPACE = "kvloom"  # Ray namespace of our actors
_ID_CHARS = 8  # characters of a node's id that are shown
_DRAIN_POLL_S = 0.2
_HEALTH_S = 10  # seconds; a replica that does not answer three checks in a row is ended
_STATS_S = 1.0  # seconds between replicas' reports to routers


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application of a fleet.yaml's `args`.

    Raises RayServeException, one sentence with the path of the wrong value: Serve shows this exception's text alone in
    its status, and keeps what runs.
    """
    try:
        return application(make_plan(parse_args(args)))
    except ServingError as error:
        raise RayServeException(str(error)) from None


def application(plan: Plan) -> serve.Application:
    """The application of a finished plan."""
    options = {
        "name": INGRESS,
        "num_replicas": plan.args.ingresses,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": 1 << 16,  # the server's own bound answers 429
        "graceful_shutdown_timeout_s": plan.args.grace_s,
        "max_surge_percent": 100,  # an upgrade starts the new ingress before it stops the old one
    }
    engines, prefill = _deployments(plan)
    return serve.deployment(serve.ingress()(ServedIngress)).options(**options).bind(plan, engines, prefill)


def engines_alone(plan: Plan) -> serve.Application:
    """The same without an ingress, for a server that is not an actor of Serve."""
    return _deployments(plan)[0]


def _deployments(plan: Plan) -> tuple[serve.Application, serve.Application | None]:
    """Deployments of replicas: those that do everything (or all but long prompts), which bind the prefill replicas."""
    roles = plan.args.roles
    if roles is None:
        return _engines(plan, ENGINES, "", plan.args.answering), None
    prefill = _engines(plan, PREFILL, "prefill", roles.prefill)
    return _engines(plan, ENGINES, "decode", plan.args.answering, prefill), prefill


def _engines(
    plan: Plan, name: str, role: str, number: int | Scaling, beside: serve.Application | None = None
) -> serve.Application:
    """`number` replicas, or as many as autoscaling asks for. All ranks of a replica are on one node."""
    args = plan.args
    options: dict[str, Any] = {
        "name": name,
        "max_ongoing_requests": 1 << 16,  # engines have queues of their own
        "graceful_shutdown_timeout_s": args.grace_s,
        "graceful_shutdown_wait_loop_s": _DRAIN_POLL_S,
        "health_check_period_s": 5,
        "health_check_timeout_s": _HEALTH_S,
        "max_constructor_retry_count": 1,
        "request_router_config": _router_config(args),
        "ray_actor_options": {"num_cpus": args.cpus_per_rank, "num_gpus": args.gpus_per_rank},
    }
    if plan.world_size > 1:
        bundle = {"CPU": args.cpus_per_rank} | ({"GPU": args.gpus_per_rank} if args.gpus_per_rank else {})
        options |= {"placement_group_bundles": [bundle] * plan.world_size, "placement_group_strategy": "STRICT_PACK"}
    options |= _scaling(number) if isinstance(number, Scaling) else {"num_replicas": number}
    return serve.deployment(ServedReplica).options(**options).bind(plan, role, beside)


def _scaling(scaling: Scaling) -> dict[str, Any]:
    policy, target = "on_requests", 1
    if isinstance(scaling, Autoscaling):
        policy, target = "on_queued_tokens", scaling.queued_tokens_per_replica
    elif isinstance(scaling, DecodeScaling):
        target = scaling.requests_per_replica
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of the interval, whose successor is no setting of an app
        config = AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            target_ongoing_requests=target,
            upscale_delay_s=scaling.up_delay_s,
            downscale_delay_s=scaling.down_delay_s,
            metrics_interval_s=1,
            look_back_period_s=5,
            policy=AutoscalingPolicy(policy_function=f"kvloom.fleet.scaling:{policy}"),
        )
    return {"autoscaling_config": config}


def _router_config(args: FleetArgs) -> RequestRouterConfig:
    return RequestRouterConfig(
        request_router_class="kvloom.fleet.routing.router:KvRouter",
        request_router_kwargs={
            "factor": args.router.guard_factor,
            "slack_tokens": args.router.guard_tokens,
            "load_cost": args.router.load_cost,
            "is_alone": args.ingresses == 1,
            "is_of_two": args.router.policy == "power-of-two",
        },
        request_routing_stats_period_s=_STATS_S,
    )


class ServedReplica:
    """EngineReplica as Serve calls it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, plan: Plan, role: str, beside: DeploymentHandle | None = None
    ) -> None:
        """`beside`: another deployment of the application, which is made with this one."""
        context = serve.get_replica_context()
        name = context.replica_id.unique_id
        node = ray.get_runtime_context().get_node_id()
        self._replica = EngineReplica(plan, name, node[:_ID_CHARS], role)
        if plan.args.kv_pool:
            await _ensure_agent(node, int(plan.args.kv_pool_gb * (1 << 30)))
        await self._replica.start()
        _join_roll(plan, node, self._replica.form)

    async def stream(self, data: bytes, hint: bytes) -> AsyncGenerator[bytes]:
        async for item in self._replica.stream(data):
            yield item

    async def post(self, data: bytes, hint: bytes) -> AsyncGenerator[bytes]:
        async for item in self._replica.post(data):
            yield item

    async def prefill(self, data: bytes, hint: bytes) -> AsyncGenerator[bytes]:
        async for item in self._replica.prefill(data):
            yield item

    async def about(self) -> bytes:
        return encode(self._replica.about())

    def check_health(self) -> None:
        self._replica.check()

    def record_routing_stats(self) -> dict[str, Any]:
        return self._replica.report()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {METRIC: float(self._replica.queued_tokens), MAILBOXES: float(self._replica.num_mailboxes)}

    def __del__(self) -> None:
        with suppress(AttributeError):  # the constructor failed
            self._replica.close()


class ServedIngress:
    """Ingress as Serve calls it."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, plan: Plan, engines: DeploymentHandle, prefill: DeploymentHandle | None
    ) -> None:
        node = ray.get_runtime_context().get_node_id()[:_ID_CHARS]
        self._grace_s = plan.args.grace_s
        self._ingress = Ingress(plan, fleet_of(plan, engines, prefill), node)
        await self._ingress.load()  # so that an upgrade sends no requests here before it can answer them

    def __serve_build_asgi_app__(self) -> Any:
        return self._ingress.app()

    async def __del__(self) -> None:
        with suppress(AttributeError):
            await self._ingress.close(self._grace_s)


def fleet_of(plan: Plan, engines: DeploymentHandle, prefill: DeploymentHandle | None) -> Fleet:
    """The ways of this process to the replicas."""

    async def describe() -> About:
        try:
            return decode_about(await engines.about.remote())
        except (RayError, RayServeException) as error:
            raise ReplicaLost(_why(error)) from None

    whole, roles = Way(calls(engines, "stream"), board_of(ENGINES), calls(engines, "post")), plan.args.roles
    if prefill is None or roles is None:
        return Fleet(describe, Ways(whole))
    return Fleet(describe, Ways(whole, Way(calls(prefill, "prefill"), board_of(PREFILL)), roles.threshold))


def calls(engines: DeploymentHandle, method: str) -> Call:
    """The streaming method of a deployment's replicas in the form that FleetEngine calls."""
    streams = engines.options(stream=True, method_name=method)

    async def call(data: bytes, hint: bytes) -> AsyncGenerator[bytes]:
        stream, is_done = streams.remote(data, hint), False
        try:
            async for item in stream:
                yield item
            is_done = True
        except (RayError, RayServeException) as error:
            is_done = True
            raise ReplicaLost(_why(error)) from None
        finally:
            if not is_done:
                stream.cancel()

    return call


def _join_roll(plan: Plan, node: str, form: str) -> None:
    """The first replica of a plan registers the form of its weights in Ray's store; later ones must have the same.

    Raises ModelError.
    """
    key, own = f"roll-{plan.id}", (node[:_ID_CHARS], form)
    _internal_kv_put(key, msgspec.json.encode(own), overwrite=False, namespace=_NAMESPACE)
    first = msgspec.json.decode(_internal_kv_get(key, namespace=_NAMESPACE), type=tuple[str, str])
    if problem := refusal(first, *own):
        raise ModelError(problem)


async def _ensure_agent(node: str, pool_bytes: int) -> None:
    """An EMS agent on this node, held by an actor that outlives replicas. Raises ModelError."""
    affinity = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"name": f"ems-agent-{node}", "namespace": _NAMESPACE, "lifetime": "detached", "get_if_exists": True}
    agent = ray.remote(NodeAgent).options(**options, num_cpus=0, scheduling_strategy=affinity).remote(pool_bytes)
    try:
        await agent.check.remote()
    except RayError as error:
        raise ModelError(f"node {node[:_ID_CHARS]}: {_why(error)}") from None


def _why(error: Exception) -> str:
    """The one informative line of Ray's message."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if isinstance(error, RayTaskError) and lines else (lines or [type(error).__name__])[0]
