"""A fleet with a Ray of its own on this machine, which is started for one server and ends with it."""

import asyncio
import contextlib
import functools
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future

from kvloom.contract.errors import ModelError, ServingError
from kvloom.fleet.args import FleetArgs
from kvloom.fleet.orphans import adopt, end_all
from kvloom.fleet.plan import Plan
from kvloom.rank.opening import model_tokenizer
from kvloom.server.config.settings import ServerConfig
from kvloom.server.run.loading import Loaded
from kvloom.server.serving.engine import Closing

# Ray reads these when it is imported, and its processes inherit them
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",  # Serve opens further ports beside loopback
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # otherwise the machine's address is used instead of 127.0.0.1
    "RAY_SERVE_LOG_TO_STDERR": "0",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # otherwise one that hangs gets the grace period, too
    "RAY_worker_niceness": "0",  # otherwise 15, so that other work on the machine would delay requests
    "RAY_ENABLE_AUTO_CONNECT": "0",  # otherwise a handle's thread that outlives this Ray connects to another one
}
os.environ.update({name: value for name, value in _ENVIRONMENT.items() if name not in os.environ})

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray._private import parameter, ray_constants  # noqa: E402
from ray.serve.schema import ApplicationStatus  # noqa: E402

from kvloom.fleet.app import ENGINES, PREFILL, engines_alone, fleet_of  # noqa: E402
from kvloom.fleet.engine import FleetEngine, manners_of  # noqa: E402
from kvloom.fleet.lost import ReplicaLost  # noqa: E402

APP = "fleet"
_POLL_S = 0.2
_FAREWELL_S = 5.0  # seconds that Ray's processes get to end by themselves
_STORE_BYTES = 100 << 20  # bytes of Ray's shared memory, through which long prompts pass


class LocalFleet:
    """An Opening of the server: Ray starts at once, the replicas in the background. Made on the main thread.

    `tell` gets progress messages; `problem` is what ended the fleet, "" when the user did.
    """

    def __init__(self, plan: Plan, config: ServerConfig, has_dashboard: bool, tell: Callable[[str], None]) -> None:
        self.opened: list[Closing] = []
        self.models: Future[Loaded] = Future()
        self.models.set_running_or_notify_cancel()
        self.problem = ""
        self._plan, self._config, self._tell = plan, config, tell
        self._is_closing = threading.Event()
        tell("starting Ray")
        adopt()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        try:
            self._address = _start(plan, has_dashboard)
        except BaseException:
            _end()
            raise
        threading.Thread(target=self._run, name="fleet", daemon=True).start()

    def close(self) -> None:
        """End every process of Ray. On the main thread: a signal meanwhile ends this process at once."""
        self._is_closing.set()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: os._exit(1))
        for engine in self.opened:
            engine.close()
        _end()

    def _run(self) -> None:
        try:
            self.models.set_result(self._load())
        except BaseException as error:  # callers that wait will raise it
            self.models.set_exception(error)
        else:
            self._watch()

    def _load(self) -> Loaded:
        """Raises ModelError, ServingError."""
        _wait(self._plan, self._tell)
        card = self._config.models[0]
        prefill = serve.get_deployment_handle(PREFILL, APP) if self._plan.args.roles else None
        fleet = fleet_of(self._plan, serve.get_deployment_handle(ENGINES, APP), prefill)

        async def describe() -> FleetEngine:
            while True:
                try:
                    return FleetEngine(await fleet.describe(), fleet.ways, manners_of(self._plan.args))
                except (ReplicaLost, ServingError) as problem:
                    self._tell(f"no replica yet: {problem}")
                    await asyncio.sleep(_POLL_S)

        engine = asyncio.run(describe())
        self.opened.append(engine)
        note = f"\n{_replicas(self._plan.args)}; Ray is at {self._address}"
        return Loaded([(card, engine, model_tokenizer(card.engine.model))], note=note)

    def _watch(self) -> None:
        """Watch Ray's processes. Without the store of Ray's head (gcs_server) replicas go on with what they have, for
        the grace period; everything on a node ends with the node's raylet.
        """
        while not self._is_closing.wait(_POLL_S):
            if dead := _dead():
                grace_s = 0 if ray_constants.PROCESS_TYPE_RAYLET in dead else self._plan.args.grace_s
                lost = f"Ray's {' and '.join(dead)} has ended"
                if grace_s:
                    self._tell(f"{lost}; the fleet ends in {grace_s:g} s")
                if not self._is_closing.wait(grace_s):
                    self.problem = f"{lost}, and the fleet with it"
                    os.kill(os.getpid(), signal.SIGTERM)
                return


def _start(plan: Plan, has_dashboard: bool) -> str:
    """Start Ray and the application, without waiting for replicas. Returns Ray's address. Raises ModelError, one
    sentence.
    """
    num_cpus = _num_cpus(plan)
    try:
        address = _start_ray(num_cpus, has_dashboard)
    except ModelError:  # Ray's own limit of 30 s is short on a busy machine
        address = _start_ray(num_cpus, has_dashboard)
    ray._private.worker.print_to_stdstream = lambda *_, **__: None  # pages of Ray's logs, despite log_to_driver
    serve.start(proxy_location="Disabled")
    target = serve.RunTarget(engines_alone(plan), name=APP, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)
    return address


def _start_ray(num_cpus: int, has_dashboard: bool) -> str:
    """Start Ray. Returns its address. Raises ModelError, one sentence."""
    try:
        with _alone():
            context = ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=has_dashboard,
                object_store_memory=_STORE_BYTES,
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
    except Exception as error:  # Ray has no exception class for it
        ray.shutdown()
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"Ray does not start: {why}") from None
    return str(context.address_info["gcs_address"])


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Keeps Ray from starting processes that start nodes or forward logs; there is no public option for it."""
    params = parameter.RayParams
    parameter.RayParams = functools.partial(params, no_monitor=True, include_log_monitor=False)
    try:
        yield
    finally:
        parameter.RayParams = params


def _replicas(args: FleetArgs) -> str:
    """How many, in words."""
    least, most = args.least_replicas, args.most_replicas
    is_fixed = isinstance(args.answering, int) and (args.roles is None or isinstance(args.roles.prefill, int))
    number = f"{most}" if is_fixed else f"{least} to {most}"
    return f"{number} replica{'' if number == '1' else 's'}"


def _num_cpus(plan: Plan) -> int:
    """As many CPUs, in Ray's accounting, as all replicas ask for: on one machine they share what there is."""
    args = plan.args
    return max(os.cpu_count() or 1, int(args.most_replicas * args.cpus_per_rank * plan.world_size) + 1)


def _wait(plan: Plan, tell: Callable[[str], None]) -> None:
    """Wait until the application runs. Raises ModelError, one sentence."""
    before = ""
    while True:
        status = serve.status().applications.get(APP)
        if status is not None and status.status is ApplicationStatus.RUNNING:
            return
        if status is not None and status.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            texts = [status.message, *(each.message for each in status.deployments.values())]
            raise ModelError(why_not("\n".join(texts)))
        states = status.deployments[ENGINES].replica_states if status and ENGINES in status.deployments else {}
        now = f"{states.get('RUNNING', 0)} of {plan.args.least_replicas} replicas are ready"
        if now != before and states:
            tell(now)
        before = now
        time.sleep(_POLL_S)


def why_not(text: str) -> str:
    """The one informative line of Serve's message about a failed deployment."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        name, is_error, problem = line.partition(": ")
        if is_error and name.startswith("kvloom."):
            return f"a replica does not start: {problem}"
    return f"the fleet does not start: {lines[-1] if lines else 'Ray says no more'}"


def _end() -> None:
    """End whatever was started. Serve first, so that running requests may finish, unless Ray is broken."""
    if ray.is_initialized() and not _dead():
        with contextlib.suppress(Exception):  # its controller may be gone; ending Ray then ends everything
            serve.shutdown()
    ray.shutdown()
    end_all(_FAREWELL_S)


def _dead() -> list[str]:
    """Names of Ray's own processes that have ended by themselves."""
    node = ray._private.worker._global_node
    return [] if node is None else [str(name) for name, _ in node.dead_processes()]
