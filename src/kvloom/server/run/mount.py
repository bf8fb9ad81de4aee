"""The dialects of a server, and the program that parses their large bodies. A new dialect is added here."""

from importlib.metadata import version

from kvloom.server.config.settings import ServerConfig
from kvloom.server.config.view import config_view
from kvloom.server.dialects.anthropic.routes import Messages
from kvloom.server.dialects.decisions.routes import Decisions
from kvloom.server.dialects.ollama.routes import Ollama
from kvloom.server.dialects.openai.embeddings import Embeddings
from kvloom.server.dialects.openai.images import Images
from kvloom.server.dialects.openai.routes import OpenAI
from kvloom.server.dialects.operators.console import Console
from kvloom.server.dialects.operators.documentation import Documentation
from kvloom.server.dialects.operators.lora import LoraAdapters
from kvloom.server.dialects.operators.metrics import Metrics
from kvloom.server.dialects.operators.status import Control, Status
from kvloom.server.dialects.rerank.classes import Classify
from kvloom.server.dialects.rerank.routes import Rerank
from kvloom.server.dialects.responses.conversations import Conversations
from kvloom.server.dialects.responses.routes import Responses
from kvloom.server.dialects.sglang.server import SglangServer
from kvloom.server.dialects.tgi.either import Generate
from kvloom.server.dialects.tgi.native import Native
from kvloom.server.dialects.tgi.routes import TextGeneration
from kvloom.server.dialects.triton.repository import TritonRepository
from kvloom.server.dialects.triton.routes import Triton
from kvloom.server.dialects.vllm.generate import Vllm
from kvloom.server.dialects.vllm.rendering import Rendering
from kvloom.server.dialects.vllm.server import VllmServer
from kvloom.server.dialects.vllm.tokenizer_info import TokenizerInfo
from kvloom.server.dialects.vllm.tokenizing import Tokenizing
from kvloom.server.dialects.without_v1 import WithoutV1
from kvloom.server.http.reply import Dialect
from kvloom.server.keeping.store import ResponseStore
from kvloom.server.serving.health import Health
from kvloom.server.serving.registry import Models


def may_stop_by_get(config: ServerConfig) -> bool:
    """Whether GET /stopService may stop the server: any page can send a GET, so only where pages cannot reach it, or
    the configuration allows it.
    """
    return config.may_stop_by_get or bool(config.api_key_hashes) or config.management is not None


def make_dialects(
    models: Models, health: Health, control: Control, config: ServerConfig, store: ResponseStore | None = None
) -> list[Dialect]:
    """Makes all dialects. `config` is shown in the console."""
    number = version("kvloom")
    tgi = TextGeneration(models, number)
    view = config_view(config)
    completions = OpenAI(models)
    openai: list[Dialect] = [
        completions, Responses(models, store), Conversations(store), Embeddings(models), Images(models),
        Decisions(models),
    ]  # fmt: skip
    dialects: list[Dialect] = [
        *openai,
        Messages(models),
        Ollama(models),
        Rerank(models),
        Classify(models),
        Tokenizing(models),
        Rendering(completions),
        TokenizerInfo(models),
        tgi,
        Generate(tgi, Vllm(models)),
        TritonRepository(models),
        Triton(models, health, number),
        Native(models),
        Status(models, health, control, may_stop_by_get(config)),
        LoraAdapters(models),
        VllmServer(models, view, number),
        SglangServer(models, health, number),
        Metrics(models),
        Console(models, health, view, number),
    ]
    endpoints = [endpoint for dialect in dialects for endpoint in dialect.endpoints]
    return [*dialects, Documentation(endpoints, number), *map(WithoutV1, openai)]
