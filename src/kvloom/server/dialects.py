"""Which dialects a server speaks. A new one is added here."""

from importlib.metadata import version

from kvloom.server.api.documentation import Documentation
from kvloom.server.api.generate import Generate
from kvloom.server.api.lora import LoraAdapters
from kvloom.server.api.metrics import Metrics
from kvloom.server.api.native import Native
from kvloom.server.api.openai import OpenAI
from kvloom.server.api.status import Status, Stop
from kvloom.server.api.tgi import TextGeneration
from kvloom.server.api.triton import Triton
from kvloom.server.api.vllm import Vllm
from kvloom.server.health import Health
from kvloom.server.models import Models
from kvloom.server.reply import Dialect


def make_dialects(models: Models, health: Health, stop: Stop, address: str = "") -> list[Dialect]:
    """All of them. `stop` and `address` as Status takes them."""
    number = version("kvloom")
    tgi = TextGeneration(models, number)
    dialects: list[Dialect] = [
        OpenAI(models),
        tgi,
        Generate(tgi, Vllm(models)),
        Triton(models, health, number),
        Native(models),
        Status(models, health, stop, address),
        LoraAdapters(models),
        Metrics(models),
    ]
    endpoints = [endpoint for dialect in dialects for endpoint in dialect.endpoints]
    return [*dialects, Documentation(endpoints, number)]
