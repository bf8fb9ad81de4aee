"""Routes for operators: health, limits, counts, tokenizing, and stopping the service."""

import asyncio
import re
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import msgspec

from kvloom.engine.errors import ServingError, Unavailable
from kvloom.engine.request import Request, SamplingParams
from kvloom.server.body import decode_body
from kvloom.server.errors import ErrorReply, NoRoute, tgi_error, tgi_reply
from kvloom.server.generation import GenerationService
from kvloom.server.health import Health
from kvloom.server.models import Models
from kvloom.server.reply import Call, Endpoint, Reply

MAX_PROBE_S = 600
FORCED_GRACE_S = 5.0  # what running requests get when the service is stopped by force
_POLL_S = 0.05
_SECONDS = re.compile(r"\d{1,4}\Z")

Stop = Callable[[float | None], Awaitable[None]]  # grace in seconds; None = the configured one


class TokenizerBody(msgspec.Struct):
    inputs: str
    do_tokenize: bool = True  # false: only count


_tokenizer_decoder = msgspec.json.Decoder(TokenizerBody)


class ServiceStopped(Unavailable):
    """It is stopping already."""

    kind = "internal"


class Status:
    """`stop` begins to stop the server and returns when what ran has ended; `address` is told in /metrics-json."""

    def __init__(self, models: Models, health: Health, stop: Stop, address: str = "") -> None:
        self._models, self._health, self._stop, self._address = models, health, stop, address

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        def get(path: str, answer: Callable[[Call], Awaitable[Reply]], summary: str) -> Endpoint:
            return Endpoint("GET", path, answer, summary, is_management=True)

        return (
            get("/", self.healthy, "Health, as TGI answers it"),
            get("/health", self.healthy, "200 while requests are accepted"),
            get("/ping", self.healthy, "The same for SageMaker"),
            get("/health/timed", self.timed, "Health, shown by a real inference of one token"),
            get("/health/timed-{seconds}", self.timed, "The same within so many seconds (1 to 600)"),
            get("/v1/config", self.config, "The default model's limits"),
            get("/v1/status", self.status, "Places, blocks and requests"),
            get("/v2/status", self.status, "The same"),
            get("/metrics-json", self.metrics, "Latency and load as a vector"),
            get("/stopService", self.stop_service, "Stop when running requests have ended; ?mode=Force within 5 s"),
            Endpoint("POST", "/v1/tokenizer", self.tokenizer, "Tokens of a text", (TokenizerBody,)),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        reply = tgi_reply(error)
        if isinstance(error, Unavailable) and not isinstance(error, ServiceStopped):
            body = msgspec.json.encode({**tgi_error(error), "error_type": "healthcheck"})
            reply = ErrorReply(reply.status, body, reply.headers)
        return reply

    async def healthy(self, call: Call) -> Reply:
        """Raises Unavailable."""
        self._health.check()
        return Reply()

    async def timed(self, call: Call) -> Reply:
        """A server that accepts but never answers fails here. Raises NoRoute, ServingError."""
        text = call.path.get("seconds", str(MAX_PROBE_S))
        if not _SECONDS.match(text) or not 1 <= int(text) <= MAX_PROBE_S:
            raise NoRoute(f"Wait time should be in range of [1, {MAX_PROBE_S}], input is not valid")
        self._health.check()
        try:
            async with asyncio.timeout(int(text)):
                for service in self._models:
                    await _probe(service, call.headers["x-request-id"])
        except TimeoutError:
            raise ServingError(f"the model gave no token within {text} s") from None
        return Reply(b'{"status":"healthy"}')

    async def config(self, call: Call) -> Reply:
        service = self._models.default
        card, info = service.card, service.engine.info
        return Reply(
            msgspec.json.encode(
                {
                    "modelName": service.name,
                    "maxSeqLen": service.engine.max_seq_len,
                    "npuMemSize": card.npu_mem_gb,
                    "cpuMemSize": card.cpu_mem_gb,
                    "worldSize": card.world_size,
                    "maxOutputLen": service.max_output_tokens,
                    "cacheBlockSize": info.block_size,
                }
            )
        )

    async def status(self, call: Call) -> Reply:
        """Of the default model; `swapped` and the CPU pool count what was moved out of the way."""
        self._health.check_live()
        service = self._models.default
        stats = service.engine.stats()
        return Reply(
            msgspec.json.encode(
                {
                    "service": {
                        "roleStatus": "RoleReady" if service.engine.is_ready else "RoleUnknown",
                        "currentRole": "none",
                    },
                    "resource": {
                        "availSlotsNum": max(0, stats.max_batch - stats.num_running),
                        "availBlockNum": stats.num_free_blocks,
                        "waitingRequestNum": stats.num_waiting + service.admission.num_waiting,
                        "runningRequestNum": stats.num_running,
                        "swappedRequestNum": stats.num_swapped,
                        "freeNpuBlockNums": stats.num_free_blocks,
                        "freeCpuBlockNums": stats.num_free_host_blocks,
                        "totalNpuBlockNums": stats.num_blocks,
                        "totalCpuBlockNums": stats.num_host_blocks,
                    },
                    "linkStatus": {"peers": []},
                }
            )
        )

    async def metrics(self, call: Call) -> Reply:
        """Times in ms, means since the start."""
        service = self._models.default
        stats = service.engine.stats()
        values = {
            "TTFT": service.meter.first_token.mean * 1e3,
            "TBT": service.meter.between_tokens.mean * 1e3,
            "waitingInferRequestNum": stats.num_waiting + service.admission.num_waiting,
            "processingInferRequestNum": stats.num_running,
            "remainBlocks": stats.num_free_blocks,
        }
        labels = {"job": "node", "instance": self._address}
        result = [{"metric": [{"__name__": name, **labels}], "value": f"{value:.6g}"} for name, value in values.items()]
        return Reply(msgspec.json.encode({"resultType": "vector", "result": result}))

    async def tokenizer(self, call: Call) -> Reply:
        """Raises BadRequest."""
        body = decode_body(_tokenizer_decoder, call.body)
        tokenizer = self._models.default.tokenizer
        ids = tokenizer.encode(body.inputs)
        texts = [tokenizer.token_bytes(i).decode("utf-8", errors="replace") for i in ids] if body.do_tokenize else []
        return Reply(msgspec.json.encode({"token_number": len(ids), "tokens": texts}))

    async def stop_service(self, call: Call) -> Reply:
        """Answers when running requests have ended. Raises ServiceStopped the second time."""
        if self._health.is_draining:
            raise ServiceStopped("The service has been stopped.")
        await self._stop(FORCED_GRACE_S if call.query.get("mode", "").lower() == "force" else None)
        return Reply()


async def _probe(service: GenerationService, id: str) -> None:
    """One token past every queue, or a step of what is running. Raises ServingError."""
    steps = service.engine.stats().total_steps

    async def ask() -> None:
        prompt = tuple(service.tokenizer.encode("Hello")[:1])
        request = Request(f"probe-{id}", prompt, SamplingParams(temperature=0, max_tokens=1))
        async with aclosing(service.engine.stream(request)) as deltas:
            async for _ in deltas:
                pass

    probe = asyncio.create_task(ask())
    try:
        while not probe.done():
            await asyncio.wait({probe}, timeout=_POLL_S)
            stats = service.engine.stats()
            if stats.num_running > 1 and stats.total_steps > steps + 1:
                return
        probe.result()
    finally:
        probe.cancel()
        await asyncio.gather(probe, return_exceptions=True)
