"""What a connector's scheduler tells its workers in a step, as plain data; and what a connector does."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Transfer:
    """Blocks of the engine's cache, and the hashes of their contents, in chain order.

    blocks: for each group of layers of the kind, one block a hash. stage: of a layer-by-layer load, where the bytes
    are.
    """

    request_id: str
    kind: int
    blocks: list[list[int]]
    hashes: list[int]
    stage: int | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks that a worker loads into its host memory, before the request has blocks for them."""

    number: int
    hashes: list[int]


@dataclass(slots=True)
class Plan:
    """What the workers do in one step. preempted: requests whose blocks are about to be overwritten. overtaken:
    requests that lose some blocks, which left the window. is_reset: loads under way are not wanted any more. stages,
    dropped: of layer-by-layer loads, what to load and what is not needed any more.
    """

    loads: list[Transfer] = field(default_factory=list)
    saves: list[Transfer] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    overtaken: list[str] = field(default_factory=list)
    is_reset: bool = False
    stages: list[Stage] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Duties:
    """What a connector does. handover_s: how long a request waits for tokens that another engine has promised.
    is_layerwise: loads are staged, and run within a step.
    """

    is_loading: bool = True
    is_saving: bool = True
    has_events: bool = False
    handover_s: float = 0.0
    is_layerwise: bool = False
