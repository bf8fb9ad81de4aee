"""Which dialects a server speaks. A new one is added here."""

from importlib.metadata import version

from kvloom.server.api.console import Console
from kvloom.server.api.documentation import Documentation
from kvloom.server.api.embeddings import Embeddings
from kvloom.server.api.generate import Generate
from kvloom.server.api.lora import LoraAdapters
from kvloom.server.api.messages import Messages
from kvloom.server.api.metrics import Metrics
from kvloom.server.api.native import Native
from kvloom.server.api.openai import OpenAI
from kvloom.server.api.responses import Responses
from kvloom.server.api.status import Status, Stop
from kvloom.server.api.tgi import TextGeneration
from kvloom.server.api.tokenizing import Tokenizing
from kvloom.server.api.triton import Triton
from kvloom.server.api.vllm import Vllm
from kvloom.server.config import ServerConfig
from kvloom.server.config_view import config_view
from kvloom.server.health import Health
from kvloom.server.models import Models
from kvloom.server.reply import Dialect


def make_dialects(models: Models, health: Health, stop: Stop, config: ServerConfig, address: str = "") -> list[Dialect]:
    """All of them. `stop` and `address` as Status takes them; `config` is shown in the console."""
    number = version("kvloom")
    tgi = TextGeneration(models, number)
    dialects: list[Dialect] = [
        OpenAI(models),
        Responses(models),
        Messages(models),
        Tokenizing(models),
        Embeddings(models),
        tgi,
        Generate(tgi, Vllm(models)),
        Triton(models, health, number),
        Native(models),
        Status(models, health, stop, address),
        LoraAdapters(models),
        Metrics(models),
        Console(models, health, config_view(config), number),
    ]
    endpoints = [endpoint for dialect in dialects for endpoint in dialect.endpoints]
    return [*dialects, Documentation(endpoints, number)]
