"""ModelCard: what is known of a served model besides its engine, and before it is loaded; shown to clients."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from kvloom.checkpoints.advice import sampling_advice
from kvloom.contract.config import EngineConfig
from kvloom.contract.errors import BadRequest


@dataclass(frozen=True, slots=True)
class ModelCard:
    """One entry of the configuration's ModelParam."""

    name: str
    engine: EngineConfig
    instance_type: str = "Standard"  # or "StandardMock"
    npu_mem_gb: float = -1  # KV cache memory as configured; -1 = measured
    cpu_mem_gb: float = 0
    world_size: int = 1
    max_input_tokens: int | None = None  # of a prompt; None = the context less maxIterTimes
    time_limit_s: float | None = None  # of a request, waiting included
    dtype: str = "auto"  # of the weights, for routes that show it
    tool_parser: str = "auto"  # how the model writes tool calls (tool_calls.ToolForm); auto = as its template says
    reasoning_parser: str = "auto"  # "think", "none"; auto = as its template says
    stream_interval: int = 1  # tokens of a choice that a stream sends together, after the first
    parses_special_text: bool = False  # whether special tokens written in a message are read as such
    prompts: Mapping[str, str] = field(default_factory=dict)  # prompt name -> text put before a text to embed
    message_form: str = ""  # of the chat message that a text to embed is put into: "flat", "structured"; "" = none
    lora_modules: tuple[tuple[str, Path], ...] = ()  # (name, folder) of adapters loaded at the start
    generation_config: str = "auto"  # "auto" = take the sampling advice in the model's files; "none" = do not
    advice: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.generation_config not in ("auto", "none"):
            raise BadRequest("generationConfig", f"must be auto or none, got {self.generation_config!r}")

    def advised(self) -> "ModelCard":
        """The card with the sampling advice of the model's files, which are read."""
        return replace(self, advice=sampling_advice(self.engine.model)) if self.generation_config == "auto" else self
