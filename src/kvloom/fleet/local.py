"""A fleet on a Ray of its own, on this machine: started for it, ended with it."""

import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvloom.contract.errors import ModelError
from kvloom.fleet.orphans import adopt, end_all
from kvloom.fleet.plan import Plan
from kvloom.net.listening import bracketed, listen

# Ray reads these when it is imported, and its processes have them from this one
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",  # for the ports that Serve opens beside loopback
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # else it takes the machine's address for 127.0.0.1
    "RAY_SERVE_LOG_TO_STDERR": "0",
}
os.environ.update({name: value for name, value in _ENVIRONMENT.items() if name not in os.environ})

import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.serve.schema import ApplicationStatus  # noqa: E402

from kvloom.fleet.app import ENGINES, application  # noqa: E402

APP = "fleet"
_POLL_S = 0.2
_FAREWELL_S = 5.0  # what Ray's processes have to end by themselves
_STORE_BYTES = 100 << 20  # Ray's shared memory; what passes through it are long prompts


@dataclass(frozen=True, slots=True)
class Running:
    """A fleet that serves. `ray_address` is for `serve status` and other programs of Ray."""

    url: str
    ray_address: str


@contextlib.contextmanager
def started(plan: Plan, port: int, has_dashboard: bool, tell: Callable[[str], None]) -> Iterator[Running]:
    """A Ray, and the fleet on it, until the block is left. `tell` hears of progress.

    Raises ListenError when the port is taken, ModelError when a replica does not start.
    """
    host = "127.0.0.1" if plan.args.host is None else plan.args.host
    with listen(host, port) as listener:
        port = listener.getsockname()[1]
    with contextlib.ExitStack() as stack:
        tell("starting Ray")
        adopt()
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        stack.callback(_end)
        context = ray.init(
            address="local",
            num_cpus=_num_cpus(plan),
            include_dashboard=has_dashboard,
            object_store_memory=_STORE_BYTES,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        serve.start(http_options={"host": host, "port": port}, proxy_location="HeadOnly")
        target = serve.RunTarget(application(plan), name=APP, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        _wait(plan, tell)
        yield Running(f"http://{bracketed(host)}:{port}", context.address_info["gcs_address"])


def _num_cpus(plan: Plan) -> int:
    """Enough in Ray's books for every replica that there may be: on one machine they share what it has."""
    args = plan.args
    return max(os.cpu_count() or 1, int(args.most_replicas * args.cpus_per_rank * plan.world_size) + 1)


def _wait(plan: Plan, tell: Callable[[str], None]) -> None:
    """Until the application runs. Raises ModelError, one sentence."""
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
    """Of Serve's message about a deployment that failed the one line that a person can use."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in reversed(lines):
        name, is_error, problem = line.partition(": ")
        if is_error and name.startswith("kvloom."):
            return f"a replica does not start: {problem}"
    return f"the fleet does not start: {lines[-1] if lines else 'Ray says no more'}"


def _end() -> None:
    """Whatever has been started. Serve ends first, so that requests under way may, unless Ray is broken already."""
    if not ray.is_initialized():
        return
    if _is_whole():
        with contextlib.suppress(Exception):  # its controller may be gone already; Ray's own end takes all of it
            serve.shutdown()
    ray.shutdown()
    end_all(_FAREWELL_S)


def _is_whole() -> bool:
    """Whether all of Ray's own processes live."""
    node = ray._private.worker._global_node
    return node is None or bool(node.remaining_processes_alive())


def wait_for_end(grace_s: float) -> str:
    """Until a signal, or until a process of Ray's own is gone; "" or what is wrong.

    Without Ray's head replicas go on with what they have: they get `grace_s` for it.
    """
    told: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: told.append(number))
    until_s = None
    while not told and (until_s is None or time.monotonic() < until_s):
        if until_s is None and not _is_whole():
            until_s = time.monotonic() + grace_s
            print(f"a process of Ray has ended; the fleet ends in {grace_s:g} s", file=sys.stderr, flush=True)
        time.sleep(_POLL_S)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: os._exit(1))  # the second is in a hurry
    if until_s is not None:
        return "a process of Ray has ended, and the fleet with it"
    print("stopping; once more stops at once", file=sys.stderr, flush=True)
    return ""
