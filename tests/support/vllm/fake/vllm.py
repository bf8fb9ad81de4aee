"""The parts of vLLM that kvloom.vllm uses, with the names of 0.32: an AsyncLLM whose tokens follow from earlier tokens.

A sampled token also depends on the seed and the number of draws, so an answer cannot be continued elsewhere, only
repeated. FAKE_VLLM_UNSTABLE: then not even that. FAKE_VLLM_KILLER: a prompt token that kills the process.
FAKE_VLLM_SEES: it accepts images; PLACEHOLDER in a prompt becomes a token for each 8 x 8 pixels, and answers depend on
the pixels.
"""

import argparse
import asyncio
import hashlib
import io
import math
import os
import signal
import sys
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from PIL import Image
from prometheus_client import Counter

__version__ = "0.32.0"
STEP_S = float(os.environ.get("FAKE_VLLM_STEP_S", "0.002"))
VOCAB_SIZE, MAX_LEN, JSON_ANSWER = 257, 2048, b'{"ok": 1}'
PLACEHOLDER, IMAGE_TOKEN, MAX_IMAGES = 1, 2, 3
extra = Counter("vllm:fake_things", "What only vLLM counts.", ["model_name"])
twin = Counter("vllm:prompt_tokens", "What kvloom counts under the same name.", ["model_name"])


class EngineDeadError(Exception):
    pass


class VLLMClientError(Exception):
    parameter: str | None = None


class RequestOutputKind(Enum):
    DELTA = 1


@dataclass(kw_only=True)
class SamplingParams:
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: dict[int, float] | None
    max_tokens: int
    min_tokens: int
    stop_token_ids: list[int]
    ignore_eos: bool
    seed: int | None
    logprobs: int | None
    logprob_token_ids: list[int] | None
    prompt_logprobs: int | None
    detokenize: bool
    skip_clone: bool
    output_kind: RequestOutputKind
    structured_outputs: Any = None


@dataclass
class StructuredOutputsParams:
    grammar: str


@dataclass
class PoolingParams:
    task: str
    use_activation: bool


@dataclass
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str


class StatLoggerBase:
    pass


class FlexibleArgumentParser(argparse.ArgumentParser):
    pass


@dataclass
class AsyncEngineArgs:
    options: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        for name in ("model", "served-model-name", "dtype", "quantization", "scheduling-policy", "runner"):
            parser.add_argument(f"--{name}")
        for name in ("structured-outputs-config", "kv-transfer-config", "distributed-executor-backend"):
            parser.add_argument(f"--{name}")
        for name in ("max-logprobs", "max-num-seqs", "max-model-len", "tensor-parallel-size", "pipeline-parallel-size"):
            parser.add_argument(f"--{name}", type=int)
        parser.add_argument("--kv-cache-memory-bytes", type=int)
        for name in ("enable-lora", "enforce-eager"):
            parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "AsyncEngineArgs":
        return cls(vars(args))


def tokens_input(ids: list[int], *, cache_salt: str | None = None) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": ids, "cache_salt": cache_salt}


@dataclass
class Logprob:
    logprob: float
    rank: int | None


def draw(*facts: object) -> int:
    """A letter or a space, the same for the same arguments."""
    number = int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:4], "little")
    return b"abcdefghijklmnopqrstuvwxyz  "[number % 28]


class ImageMediaIO:
    def load_bytes(self, data: bytes) -> Image.Image:
        try:
            return Image.open(io.BytesIO(data)).convert("RGB")
        except OSError as error:
            raise ValueError(f"Failed to load image: {error}") from error


class Seer:
    """The model class, as far as images are concerned."""

    @staticmethod
    def get_placeholder_str(modality: str, number: int) -> str:
        return chr(PLACEHOLDER)


def get_model_cls(model_config: Any) -> type[Seer]:
    return Seer


class Renderer:
    def get_mm_processor(self) -> Any:
        return SimpleNamespace(info=SimpleNamespace(allowed_mm_limits={"image": MAX_IMAGES}))

    async def render_cmpl_async(self, prompts: list[Any], *, skip_mm_cache: bool) -> list[Any]:
        [prompt], found = prompts, list[int]()
        images = prompt["multi_modal_data"]["image"]
        if len(images) > MAX_IMAGES:
            raise ValueError(f"At most {MAX_IMAGES} image(s) may be provided in one prompt.")
        left = iter(images)
        for token in prompt["prompt_token_ids"]:
            image = next(left) if token == PLACEHOLDER else None
            found += [token] if image is None else [IMAGE_TOKEN] * (image.width // 8 * (image.height // 8) or 1)
        pixels = [hashlib.sha256(image.tobytes()).hexdigest() for image in images]
        return [{"type": "multimodal", "prompt_token_ids": found, "mm_hashes": {"image": pixels}}]


class AsyncLLM:
    renderer = Renderer()

    def __init__(self, args: AsyncEngineArgs, loggers: list[Any]) -> None:
        options = args.options
        lora = SimpleNamespace(max_lora_rank=16) if options["enable_lora"] else None
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                get_vocab_size=lambda: VOCAB_SIZE, get_hidden_size=lambda: 8, dtype="torch.bfloat16",
                quantization=options["quantization"], max_model_len=options["max_model_len"] or MAX_LEN,
                is_multimodal_model=bool(os.environ.get("FAKE_VLLM_SEES")),
            ),
            cache_config=SimpleNamespace(num_gpu_blocks=100, block_size=16, kv_cache_memory_bytes=1 << 20),
            scheduler_config=SimpleNamespace(policy=options["scheduling_policy"]),
            lora_config=lora,
        )  # fmt: skip
        self.is_pooling = options["runner"] == "pooling"
        self.loggers = [make(self.vllm_config, 0) for make in loggers]
        self.num_running, self.num_exact, self.loras = 0, 0, set[int]()

    @classmethod
    def from_engine_args(cls, args: AsyncEngineArgs, stat_loggers: list[Any]) -> "AsyncLLM":
        return cls(args, stat_loggers)

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("embed",) if self.is_pooling else ("generate",)

    def _record(self) -> None:
        now = SimpleNamespace(num_running_reqs=self.num_running, num_waiting_reqs=0, kv_cache_usage=0.25)
        for logger in self.loggers:
            logger.record(now, SimpleNamespace(num_preempted_reqs=0), engine_idx=0)

    async def generate(
        self, prompt: Any, params: SamplingParams, name: str, lora_request: Any = None, priority: int = 0
    ) -> Any:
        ids, answer = list(prompt["prompt_token_ids"]), list[int]()
        if os.environ.get("FAKE_VLLM_KILLER") in map(str, ids):
            os.kill(os.getpid(), signal.SIGKILL)
        extra.labels("m").inc()
        self.num_running += 1
        self.num_exact += bool(params.logprob_token_ids)
        try:
            while True:
                await asyncio.sleep(STEP_S)
                facts = [ids, answer, lora_request and lora_request.lora_path, prompt.get("cache_salt")]
                facts.append(prompt.get("mm_hashes"))
                if params.temperature:
                    facts += [params.seed, len(answer)]
                    if os.environ.get("FAKE_VLLM_UNSTABLE"):
                        facts.append(os.getpid())
                token = draw(*facts) if params.temperature else draw(ids + answer, *facts[2:])
                if params.structured_outputs:
                    token = [*JSON_ANSWER, 256][len(answer)]
                if params.logit_bias:
                    token = max(params.logit_bias, key=lambda id: params.logit_bias[id])
                answer.append(token)
                finish = "stop" if token in params.stop_token_ids and len(answer) >= params.min_tokens else None
                finish = finish or ("length" if len(answer) >= params.max_tokens else None)
                self._record()
                yield self._output(params, ids, answer, finish, prompt.get("mm_hashes"))
                if finish:
                    return
        finally:
            self.num_running -= 1
            self.num_exact -= bool(params.logprob_token_ids)
            self._record()

    def _output(self, params: SamplingParams, ids: list[int], answer: list[int], finish: str | None, seen: Any) -> Any:
        def scored(token: int, num: int, also: Any = ()) -> dict[int, Logprob]:
            found = {id: Logprob(-1.0 - id, None) for id in also or ()}
            return {token: Logprob(-0.5, 1), **{i: Logprob(-1.0 - i, i + 2) for i in range(num)}, **found}

        wants = params.logprobs is not None or params.logprob_token_ids
        logprobs = [scored(answer[-1], params.logprobs or 0, params.logprob_token_ids)] if wants else None
        if params.logprobs is not None and self.num_exact:  # vLLM's first model runner mixes them
            logprobs = [{answer[-1]: Logprob(-0.5, 1), 0: Logprob(-math.inf, None)}]
        prompt_logprobs = None
        if params.prompt_logprobs is not None and len(answer) == 1:
            prompt_logprobs = [None, *(scored(id, params.prompt_logprobs) for id in ids[1:])]
            for id, found in zip(ids[1:], prompt_logprobs[1:], strict=True) if seen else ():
                found[id] = Logprob(-draw(id, seen) / 100, 1)
        out = SimpleNamespace(token_ids=[answer[-1]], logprobs=logprobs, finish_reason=finish)
        return SimpleNamespace(outputs=[out], num_cached_tokens=16, prompt_logprobs=prompt_logprobs)

    async def encode(
        self, prompt: Any, params: PoolingParams, name: str, lora_request: Any = None, priority: int = 0
    ) -> Any:
        await asyncio.sleep(STEP_S)
        data = np.arange(8, dtype=np.float32) + len(prompt["prompt_token_ids"])
        yield SimpleNamespace(outputs=SimpleNamespace(data=Tensor(data)), num_cached_tokens=0)

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        return True

    async def add_lora(self, request: LoRARequest) -> bool:
        self.loras.add(request.lora_int_id)
        return True

    async def remove_lora(self, id: int) -> bool:
        self.loras.remove(id)
        return True


class Tensor:
    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def float(self) -> "Tensor":
        return self

    def numpy(self) -> np.ndarray:
        return self.data


_WHERE = {
    "vllm.engine.arg_utils": (AsyncEngineArgs,),
    "vllm.utils.argparse_utils": (FlexibleArgumentParser,),
    "vllm.v1.engine.async_llm": (AsyncLLM,),
    "vllm.v1.engine.exceptions": (EngineDeadError,),
    "vllm.v1.metrics.loggers": (StatLoggerBase,),
    "vllm.sampling_params": (SamplingParams, StructuredOutputsParams, RequestOutputKind),
    "vllm.pooling_params": (PoolingParams,),
    "vllm.inputs.engine": (tokens_input,),
    "vllm.lora.request": (LoRARequest,),
    "vllm.multimodal.media.image": (ImageMediaIO,),
    "vllm.model_executor.model_loader": (get_model_cls,),
    "vllm.exceptions": (VLLMClientError,),
}
for name, things in _WHERE.items():
    parts = name.split(".")
    for end in range(2, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
    for thing in things:
        setattr(sys.modules[name], thing.__name__, thing)
