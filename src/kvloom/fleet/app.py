"""`build`: the fleet as an application of Ray Serve, for `serve run`, `serve deploy` and KubeRay alike.

Ray is imported here, in router.py and in local.py, and nowhere else of kvloom.
"""

from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from kvloom.fleet.args import FleetArgs, parse_args
from kvloom.fleet.ingress import Fleet, Ingress
from kvloom.fleet.lost import ReplicaLost
from kvloom.fleet.plan import Plan, make_plan
from kvloom.fleet.replica import EngineReplica
from kvloom.fleet.routing.board import board_of
from kvloom.fleet.wire import About, decode_about, encode

ENGINES, INGRESS = "engines", "ingress"
ROUTERS = {"prefix": "kvloom.fleet.routing.router:KvRouter"}
_STATS_S = 1.0  # how often replicas tell routers how they are


def build(args: Mapping[str, Any]) -> serve.Application:
    """The application of a fleet.yaml's `args`. Raises BadRequest, one sentence with the path of the wrong value."""
    return application(make_plan(parse_args(args)))


def application(plan: Plan) -> serve.Application:
    """Of a plan that is made."""
    engines = serve.deployment(ServedReplica).options(**_engine_options(plan.args, plan.world_size)).bind(plan)
    options = {
        "name": INGRESS,
        "num_replicas": plan.args.ingresses,
        "ray_actor_options": {"num_cpus": 0},
        "max_ongoing_requests": 1 << 16,  # the server's own bound is what answers 429
        "graceful_shutdown_timeout_s": plan.args.grace_s,
        "max_surge_percent": 100,  # a new ingress answers before an old one stops
    }
    return serve.deployment(serve.ingress()(ServedIngress)).options(**options).bind(plan, engines)


def _engine_options(args: FleetArgs, world_size: int) -> dict[str, Any]:
    options: dict[str, Any] = {
        "name": ENGINES,
        "max_ongoing_requests": 1 << 16,  # engines queue for themselves
        "graceful_shutdown_timeout_s": args.grace_s,
        "health_check_period_s": 5,
        "max_constructor_retry_count": 1,
        "request_router_config": _router_config(args),
    }
    if world_size > 1:
        bundle = {"CPU": args.cpus_per_rank} | ({"GPU": args.gpus_per_rank} if args.gpus_per_rank else {})
        options |= {"placement_group_bundles": [bundle] * world_size, "placement_group_strategy": "STRICT_PACK"}
    options["ray_actor_options"] = {"num_cpus": args.cpus_per_rank, "num_gpus": args.gpus_per_rank}
    if args.autoscaling is None:
        return options | {"num_replicas": args.replicas}
    scaling = args.autoscaling
    policy = AutoscalingPolicy(policy_function="kvloom.fleet.scaling:on_queued_tokens")
    return options | {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=scaling.min_replicas,
            max_replicas=scaling.max_replicas,
            target_ongoing_requests=scaling.queued_tokens_per_replica,
            upscale_delay_s=scaling.up_delay_s,
            downscale_delay_s=scaling.down_delay_s,
            metrics_interval_s=1,
            look_back_period_s=5,
            policy=policy,
        )
    }


def _router_config(args: FleetArgs) -> RequestRouterConfig:
    if args.router.policy not in ROUTERS:
        return RequestRouterConfig(request_routing_stats_period_s=_STATS_S)
    return RequestRouterConfig(
        request_router_class=ROUTERS[args.router.policy],
        request_router_kwargs={
            "factor": args.router.guard_factor,
            "slack_tokens": args.router.guard_tokens,
            "load_cost": args.router.load_cost,
            "is_alone": args.ingresses == 1,
        },
        request_routing_stats_period_s=_STATS_S,
    )


class ServedReplica:
    """EngineReplica as Serve calls it."""

    async def __init__(self, plan: Plan) -> None:  # type: ignore[misc]  # Serve awaits it
        context = serve.get_replica_context()
        name = context.replica_id.unique_id
        self._replica = EngineReplica(plan, name, ray.get_runtime_context().get_node_id()[:8])
        await self._replica.start()

    async def stream(self, data: bytes, hint: bytes) -> AsyncGenerator[bytes]:
        async for item in self._replica.stream(data):
            yield item

    async def about(self) -> bytes:
        return encode(self._replica.about())

    def check_health(self) -> None:
        self._replica.check()

    def record_routing_stats(self) -> dict[str, Any]:
        return self._replica.report()

    def record_autoscaling_stats(self) -> dict[str, float]:
        return {"queued_tokens": float(self._replica.queued_tokens)}

    def __del__(self) -> None:
        with suppress(AttributeError):  # one that could not be made
            self._replica.close()


class ServedIngress:
    """Ingress as Serve calls it."""

    def __init__(self, plan: Plan, engines: DeploymentHandle) -> None:
        self._engines = engines
        self._streams = engines.options(stream=True, method_name="stream")
        node = ray.get_runtime_context().get_node_id()[:8]
        self._grace_s = plan.args.grace_s
        self._ingress = Ingress(plan, Fleet(self._describe, self._call, board_of(ENGINES)), node)

    def __serve_build_asgi_app__(self) -> Any:
        return self._ingress.app()

    async def _describe(self) -> About:
        try:
            return decode_about(await self._engines.about.remote())
        except (RayError, RayServeException) as error:
            raise ReplicaLost(_why(error)) from None

    async def _call(self, data: bytes, hint: bytes) -> AsyncGenerator[bytes]:
        """Raises ReplicaLost."""
        stream = self._streams.remote(data, hint)
        is_done = False
        try:
            async for item in stream:
                yield item
            is_done = True
        except RayTaskError as error:
            is_done = True
            raise ReplicaLost(_why(error)) from None
        except (RayActorError, RayError, RayServeException) as error:
            is_done = True
            raise ReplicaLost(_why(error)) from None
        finally:
            if not is_done:
                stream.cancel()

    async def __del__(self) -> None:
        with suppress(AttributeError):
            await self._ingress.close(self._grace_s)


def _why(error: Exception) -> str:
    """One line of Ray's many."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if isinstance(error, RayTaskError) and lines else (lines or [type(error).__name__])[0]
