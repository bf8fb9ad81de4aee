"""Desk: answers the server's orders with vLLM's AsyncLLM. Runs in vLLM's process."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from prometheus_client import generate_latest

from kvloom.checkpoints.files import read_object
from kvloom.checkpoints.lora import FIELD, read_digest
from kvloom.contract.errors import BadRequest, ModelError
from kvloom.contract.hosted import (
    Abort,
    Answers,
    Brought,
    Figures,
    HostOrder,
    HostReport,
    HostSetup,
    ResetCache,
    Start,
    WasReset,
)
from kvloom.contract.messages import (
    AdapterInfo,
    AdapterLoaded,
    AdapterRefused,
    LoadAdapter,
    RankInfo,
    UnloadAdapter,
)
from kvloom.vllm.asking import kind_of, lacks_of, lark_of, logprob_of, priority_of, sampling_fields
from kvloom.vllm.images import Seer
from kvloom.vllm.one_kind import OneKind
from kvloom.vllm.parsing import parse

_FIGURES_S = 0.1
_METRICS_S = 5.0
Send = Callable[[HostReport], None]


async def open_desk(setup: HostSetup, arguments: Sequence[str], send: Send) -> "Desk":
    """Load the model. Raises BadRequest, and whatever vLLM raises."""
    engine_args = parse(arguments)
    figures = _Figures(send)
    kind = import_module("vllm.v1.engine.async_llm").AsyncLLM
    llm = kind.from_engine_args(engine_args, stat_loggers=[figures.logger(import_module("vllm.v1.metrics.loggers"))])
    tasks = await llm.get_supported_tasks()
    seer = Seer(llm)
    return Desk(llm, setup, _info(llm, tasks, seer), seer, send)


def _info(llm: Any, tasks: Sequence[str], seer: Seer) -> RankInfo:
    config = llm.vllm_config
    model, cache = config.model_config, config.cache_config
    pooler = getattr(model, "pooler_config", None)
    kind = getattr(pooler, "seq_pooling_type", None) or getattr(pooler, "pooling_type", None) or "last"
    return RankInfo(
        cache.num_gpu_blocks or 0,
        cache.block_size,
        model.get_vocab_size(),
        model.max_model_len,
        "vllm",
        kv_bytes=cache.kv_cache_memory_bytes or 0,
        hidden_size=model.get_hidden_size(),
        pooling=str(kind).lower(),
        held_as=f"{str(model.dtype).removeprefix('torch.')}{f', {model.quantization}' if model.quantization else ''}",
        lacks=lacks_of(tasks, config.scheduler_config.policy),
        sees=seer.sees,
        image_text=seer.image_text,
    )


class Desk:
    """Owned by the loop."""

    def __init__(self, llm: Any, setup: HostSetup, info: RankInfo, seer: Seer, send: Send) -> None:
        self.info = info
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()  # why vLLM cannot continue
        self._llm, self._eos_ids, self._seer, self._send = llm, setup.eos_ids, seer, send
        self._running: dict[int, asyncio.Task[None]] = {}
        self._company = OneKind()
        self._is_mixable = bool(getattr(llm.vllm_config, "use_v2_model_runner", False))
        self._others: set[asyncio.Task[None]] = set()
        self._fresh: list[Brought] = []
        self._names = itertools.count()
        self._adapters: dict[int, Any] = {}
        parts = import_module("vllm.sampling_params")
        self._params, self._grammar, self._kind = (
            parts.SamplingParams, parts.StructuredOutputsParams, parts.RequestOutputKind.DELTA,
        )  # fmt: skip
        self._pooling = import_module("vllm.pooling_params").PoolingParams
        self._tokens = import_module("vllm.inputs.engine").tokens_input
        self._lora = import_module("vllm.lora.request").LoRARequest
        self._dead = import_module("vllm.v1.engine.exceptions").EngineDeadError
        self._refusals = (import_module("vllm.exceptions").VLLMClientError, ValueError)

    def take(self, order: HostOrder) -> None:
        """Start an order, without waiting for its end."""
        if isinstance(order, Start):
            self._running[order.id] = asyncio.ensure_future(self._run(order))
        elif isinstance(order, Abort):
            if (task := self._running.pop(order.id, None)) is not None:
                task.cancel()
        else:
            task = asyncio.ensure_future(self._do(order))
            self._others.add(task)
            task.add_done_callback(self._others.discard)

    async def _do(self, order: LoadAdapter | UnloadAdapter | ResetCache) -> None:
        try:
            if isinstance(order, LoadAdapter):
                self._send(await self._load(order))
            elif isinstance(order, UnloadAdapter):
                if self._adapters.pop(order.id, None) is not None:
                    await self._llm.remove_lora(order.id)
            else:
                await self._llm.reset_prefix_cache(reset_running_requests=order.preempts)
                self._send(WasReset())
        except Exception as error:
            self._fail(error)

    async def _load(self, order: LoadAdapter) -> AdapterLoaded | AdapterRefused:
        if self._llm.vllm_config.lora_config is None:
            return AdapterRefused(
                FIELD, "vLLM was started without adapters; --vllm enable_lora=true makes room for them"
            )
        try:
            digest, num_bytes = read_digest(Path(order.path))
            rank = int(read_object(Path(order.path) / "adapter_config.json").get("r", 0))
        except BadRequest as error:
            return AdapterRefused(error.field, error.problem)
        except (ModelError, ValueError, TypeError):
            return AdapterRefused(FIELD, "adapter_config.json cannot be read")
        most = self._llm.vllm_config.lora_config.max_lora_rank
        if rank > most:
            return AdapterRefused(FIELD, f"has rank {rank}, and vLLM was started with max_lora_rank={most}")
        request = self._lora(f"adapter-{order.id}", order.id, order.path)
        try:
            await self._llm.add_lora(request)
        except self._dead:
            raise
        except Exception as error:
            return AdapterRefused(FIELD, f"vLLM does not take it: {' '.join(str(error).split())[:300]}")
        self._adapters[order.id] = request
        return AdapterLoaded(AdapterInfo(digest, rank, num_bytes))

    def _fail(self, error: Exception) -> None:
        if not self.failed.done():
            self.failed.set_result(f"vLLM failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    async def _run(self, order: Start) -> None:
        """Run one request to its end."""
        try:
            prompt = await self._prompt(order)
            name, lora = f"{order.id}-{next(self._names)}", self._adapters.get(order.adapter)
            if order.is_look:
                self._bring(Brought(order.id, prompt_ids=list(prompt["prompt_token_ids"])))
                return
            if order.pooling:
                await self._embed(order, prompt, name, lora)
                return
            async with self._company.among("" if self._is_mixable else kind_of(order.params)):
                await self._generate(order, prompt, name, lora)
        except asyncio.CancelledError:
            raise
        except self._dead as error:
            self._fail(error)
        except BadRequest as error:
            self._bring(Brought(order.id, error=error.problem, field=error.field))
        except self._refusals as error:
            field = getattr(error, "parameter", None) or _blamed(order)
            self._bring(Brought(order.id, error=" ".join(str(error).split())[:500], field=str(field)))
        except Exception as error:
            said = error.__cause__ or error
            self._bring(Brought(order.id, error=f"vLLM failed: {type(said).__name__}: {said}"[:500]))
        finally:
            if self._running.get(order.id) is asyncio.current_task():
                del self._running[order.id]

    async def _prompt(self, order: Start) -> Any:
        """The prompt in vLLM's form. Raises BadRequest, ValueError."""
        if order.sight is not None:
            return await self._seer.prompt_of(order)
        return self._tokens(order.prompt_ids, cache_salt=order.cache_salt or None)

    async def _embed(self, order: Start, prompt: Any, name: str, lora: Any) -> None:
        params = self._pooling(task="embed", use_activation=False)
        async for out in self._llm.encode(prompt, params, name, lora_request=lora, priority=priority_of(order)):
            data = out.outputs.data.float().numpy().tobytes()
            self._bring(Brought(order.id, embedding=data, num_cached=getattr(out, "num_cached_tokens", 0) or 0))

    async def _generate(self, order: Start, prompt: Any, name: str, lora: Any) -> None:
        fields = sampling_fields(order, self._eos_ids)
        if order.params.grammar:
            fields["structured_outputs"] = self._grammar(grammar=lark_of(order.params.grammar))
        params = self._params(**fields, output_kind=self._kind)
        is_first = True
        outputs = self._llm.generate(prompt, params, name, lora_request=lora, priority=priority_of(order))
        async for out in outputs:
            self._bring(self._brought(order, out, is_first))
            is_first = False

    def _brought(self, order: Start, out: Any, is_first: bool) -> Brought:
        answer, params = out.outputs[0], order.params
        brought = Brought(order.id, list(answer.token_ids), finish=answer.finish_reason or "")
        if answer.finish_reason not in (None, "stop", "length"):
            brought.error = f"vLLM ended the request: {answer.finish_reason}"
        if params.logprobs is not None and answer.logprobs:
            pairs = zip(answer.token_ids, answer.logprobs, strict=True)
            brought.logprobs = [logprob_of(id, found, params.logprobs, params.logprob_ids) for id, found in pairs]
        if is_first:
            brought.num_cached = out.num_cached_tokens or 0
            if params.prompt_logprobs is not None and out.prompt_logprobs:
                first = max(1, params.scored_from)
                scored = zip(order.prompt_ids[first:], out.prompt_logprobs[first:], strict=True)
                brought.prompt_logprobs = [logprob_of(id, found, params.prompt_logprobs) for id, found in scored]
        return brought

    def _bring(self, brought: Brought) -> None:
        """Send tokens, joined with those of other requests in the same turn of the loop: one message a step."""
        if not self._fresh:
            asyncio.get_running_loop().call_soon(self._tell)
        self._fresh.append(brought)

    def _tell(self) -> None:
        fresh, self._fresh = self._fresh, []
        self._send(Answers(fresh))


def _blamed(order: Start) -> str:
    """The field that is most likely at fault when vLLM refuses a request without naming one."""
    if order.is_look and order.sight is not None:
        return order.sight.images[0].name
    return "response_format" if order.params.grammar else "prompt"


class _Figures:
    """Sends vLLM's figures at most every _FIGURES_S, and its metrics as text every _METRICS_S, while it works."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._told_s = self._scraped_s = 0.0
        self._now = Figures()
        self._due: asyncio.TimerHandle | None = None

    def logger(self, loggers: Any) -> Callable[[Any, int], Any]:
        """A factory of vLLM's stat loggers."""
        record = self.record

        class Logger(loggers.StatLoggerBase):  # type: ignore[misc]
            def __init__(self, vllm_config: Any, engine_index: int = 0) -> None: ...
            def log_engine_initialized(self) -> None: ...
            def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **more: Any) -> None:
                record(scheduler_stats, iteration_stats)

        return Logger

    def record(self, scheduler: Any, iteration: Any) -> None:
        now = self._now
        if scheduler is not None:
            now.num_running, now.num_waiting = scheduler.num_running_reqs, scheduler.num_waiting_reqs
            now.kv_usage = float(scheduler.kv_cache_usage)
            now.total_steps += 1
        if iteration is not None:
            now.total_preemptions += iteration.num_preempted_reqs
        if self._due is None:
            wait_s = max(0.0, self._told_s + _FIGURES_S - time.monotonic())
            self._due = asyncio.get_running_loop().call_later(wait_s, self._tell)

    def _tell(self) -> None:
        self._due, self._told_s = None, time.monotonic()
        self._now.metrics = None
        if self._told_s >= self._scraped_s + _METRICS_S or not self._now.num_running:
            self._scraped_s = self._told_s
            self._now.metrics = generate_latest().decode()
        self._send(self._now)
