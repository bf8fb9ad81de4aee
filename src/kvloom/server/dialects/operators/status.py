"""Routes for operators: health, limits, counts, tokenizing, and stopping the service."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from kvloom.contract.errors import Overloaded, ServingError, Unavailable
from kvloom.contract.numbers import whole
from kvloom.server.errors import ErrorReply, NoRoute, WrongMethod, tgi_error, tgi_reply
from kvloom.server.http.body import decode_body
from kvloom.server.http.reply import Endpoint, HttpRequest, Reply
from kvloom.server.serving.health import Health
from kvloom.server.serving.probe import probe
from kvloom.server.serving.prompts import encode_text, request_limit
from kvloom.server.serving.registry import Models

MAX_PROBE_S = 600
FORCED_GRACE_S = 5.0  # seconds for running requests when the service is stopped by force
_STOP_SUMMARY = "Stop when running requests have ended; ?mode=Force within 5 s"

Stop = Callable[[float | None], Awaitable[None]]  # grace in seconds; None = the configured one


class TokenizerBody(msgspec.Struct):
    inputs: str
    do_tokenize: bool = True  # false: only count


_tokenizer_decoder = msgspec.json.Decoder(TokenizerBody)


class ServiceStopped(Unavailable):
    """It is stopping already."""

    kind = "internal"


@dataclass(frozen=True, slots=True)
class Control:
    """`stop` begins to stop the server and returns when running requests have ended; `address` is shown in
    /metrics-json.
    """

    stop: Stop
    address: str = ""


class Status:
    def __init__(self, models: Models, health: Health, control: Control, may_stop_by_get: bool = False) -> None:
        self._models, self._health, self._control = models, health, control
        self._may_stop_by_get = may_stop_by_get

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        def get(
            path: str, answer: Callable[[HttpRequest], Awaitable[Reply]], summary: str, is_early: bool = False
        ) -> Endpoint:
            return Endpoint("GET", path, answer, summary, is_management=True, is_early=is_early)

        return (
            get("/", self.root, "Health, as TGI has it, in the words that Ollama's clients look for"),
            get("/health", self.healthy, "200 while requests are accepted"),
            get("/healthz", self.healthy, "The same for Kubernetes"),
            get("/livez", self.live, "200 while the server runs, loading, asleep or busy", is_early=True),
            get("/readyz", self.ready, "As /health, and 503 while the queue is full"),
            get("/ping", self.healthy, "The same for SageMaker"),
            Endpoint("POST", "/ping", self.healthy, "The same", is_management=True),
            get("/health/timed", self.timed, "Health, shown by a real inference of one token"),
            get("/health/timed-{seconds}", self.timed, "The same within so many seconds (1 to 600)"),
            get("/v1/config", self.config, "The default model's limits"),
            get("/v1/status", self.status, "Admission slots, blocks and requests"),
            get("/v2/status", self.status, "The same"),
            get("/metrics-json", self.metrics, "Latency and load as a vector"),
            get("/stopService", self.stop_by_get, "The same as POST, where the configuration allows it", is_early=True),
            Endpoint("POST", "/stopService", self.stop_service, _STOP_SUMMARY, is_management=True, is_early=True),
            Endpoint("POST", "/v1/tokenizer", None, "Tokens of a text", (TokenizerBody,), parse=self.tokenize),
        )

    def error_reply(self, error: ServingError) -> ErrorReply:
        reply = tgi_reply(error)
        if isinstance(error, Unavailable) and not isinstance(error, ServiceStopped):
            body = msgspec.json.encode({**tgi_error(error), "error_type": "healthcheck"})
            reply = ErrorReply(reply.status, body, reply.headers)
        return reply

    async def healthy(self, request: HttpRequest) -> Reply:
        """Raises Unavailable."""
        self._health.check()
        return Reply()

    async def root(self, request: HttpRequest) -> Reply:
        """Raises Unavailable."""
        self._health.check()
        return Reply(b"Ollama is running", media_type="text/plain; charset=utf-8")

    async def live(self, request: HttpRequest) -> Reply:
        """Raises Unavailable."""
        self._health.check_live()
        return Reply()

    async def ready(self, request: HttpRequest) -> Reply:
        """Raises Unavailable."""
        try:
            self._health.check_ready()
        except Overloaded as error:
            raise Unavailable(str(error)) from None
        return Reply()

    async def timed(self, request: HttpRequest) -> Reply:
        """A server that accepts but never answers fails here. Raises NoRoute, ServingError."""
        text = request.path.get("seconds", str(MAX_PROBE_S))
        seconds = whole(text, MAX_PROBE_S)
        if not seconds:
            raise NoRoute(f"Wait time should be in range of [1, {MAX_PROBE_S}], input is not valid")
        self._health.check()
        await probe(self._models, request.headers["x-request-id"], seconds)
        return Reply(b'{"status":"healthy"}')

    async def config(self, request: HttpRequest) -> Reply:
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

    async def status(self, request: HttpRequest) -> Reply:
        """Of the default model; `swapped` and the CPU pool count swapped-out sequences and blocks."""
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

    async def metrics(self, request: HttpRequest) -> Reply:
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
        labels = {"job": "node", "instance": self._control.address}
        result = [{"metric": [{"__name__": name, **labels}], "value": f"{value:.6g}"} for name, value in values.items()]
        return Reply(msgspec.json.encode({"resultType": "vector", "result": result}))

    def tokenize(self, request: HttpRequest) -> Reply:
        """Raises BadRequest."""
        body = decode_body(_tokenizer_decoder, request.body)
        service = self._models.default
        tokenizer = service.tokenizer
        ids = encode_text(service, body.inputs, "inputs", request_limit(service))
        texts = [tokenizer.token_bytes(i).decode("utf-8", errors="replace") for i in ids] if body.do_tokenize else []
        return Reply(msgspec.json.encode({"token_number": len(ids), "tokens": texts}))

    async def stop_by_get(self, request: HttpRequest) -> Reply:
        """Raises WrongMethod, ServiceStopped."""
        if not self._may_stop_by_get:
            raise WrongMethod(
                "GET /stopService is off, as every page in a browser can send it: use POST; "
                "managementPort, API keys or stopServiceByGet in config.json turn it on"
            )
        return await self.stop_service(request)

    async def stop_service(self, request: HttpRequest) -> Reply:
        """Answers when running requests have ended. Raises ServiceStopped the second time."""
        if self._health.is_draining:
            raise ServiceStopped("The service has been stopped.")
        await self._control.stop(FORCED_GRACE_S if request.query.get("mode", "").lower() == "force" else None)
        return Reply()
