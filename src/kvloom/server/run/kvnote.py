"""Notes at startup: how a model is sampled and how it writes, and the memory of its weights and its keys and values."""

from collections.abc import Mapping

from kvloom.contract.capacity import AHEAD
from kvloom.contract.config import BACKENDS, EngineConfig
from kvloom.contract.messages import RankInfo
from kvloom.contract.sampling import advice_text
from kvloom.contract.tokenizer import Tokenizer
from kvloom.server.chat.style import form_of
from kvloom.server.serving.card import ModelCard


def weights_note(name: str, info: RankInfo) -> str:
    """A line with the form of the weights and their size, and one of the draft model's; "" for a mock."""
    size = f", {_size(info.weight_bytes)}" if info.weight_bytes else ""
    told = f"{name}: weights {info.held_as}{size}.\n" if info.held_as else ""
    weights, kept = info.draft_bytes
    if weights:
        token_kb = kept / (info.num_blocks * info.block_size * 1024)
        told += f"{name}: draft model: {_size(weights)} weights, {token_kb:.3g} KB a token.\n"
    return told


def advice_note(name: str, advice: Mapping[str, float]) -> str:
    """A line with the default sampling parameters from the model's files; "" when these have none."""
    said = advice_text(advice)
    return f"{name}: where a request does not say, {said}, as its files advise.\n" if said else ""


def form_note(card: ModelCard, tokenizer: Tokenizer) -> str:
    """A line with the form of calls and reasoning, and how it was found; "" where there is no chat template."""
    if not tokenizer.chat_template(has_tools=True):
        return ""
    return f"{card.name}: {form_of(tokenizer, True, card.tool_parser, card.reasoning_parser)}.\n"


def kv_note(name: str, info: RankInfo, config: EngineConfig) -> str:
    """A line with the KV cache's maximum size and the memory that it has taken so far; "" for a mock."""
    if config.backend == "fake" or not info.num_blocks:
        return ""
    may = f"{name}: room for {info.num_blocks * info.block_size:,} tokens in a KV cache of {_size(info.kv_bytes)}"
    if info.num_window_blocks:
        may += f", and of {info.num_window_blocks * info.block_size:,} tokens in layers with a window; {_rates(info)}"
    if info.num_states:
        size, most = _size(info.state_bytes), _size(info.num_states * info.state_bytes)
        may += f", and for {info.num_states} sequences at once, whose states of {size} each take up to {most}"
    if info.num_snapshots:
        most = _size(info.num_snapshots * info.state_bytes)
        may += f", and for {info.num_snapshots} such states of prefixes that were computed before, up to {most}"
    if info.num_host_blocks:
        may += f", and {_size(info.num_host_blocks * sum(info.block_bytes))} for sequences that are swapped out"
    if config.device != "cpu" or config.backend not in BACKENDS:
        return f"{may}.\n"
    now = f"{_size(min(AHEAD.least, info.kv_bytes))} of it are taken now, more when sequences need it"
    if info.kv_bytes > AHEAD.least:
        now += f" and up to {_size(min(AHEAD.at_rest, info.kv_bytes))} more for them while nobody asks"
    back = f"; it goes back after {config.idle_release_s:g} s without work" if config.idle_release_s else ""
    return f"{may}; {now}{back}.\n"


def _rates(info: RankInfo) -> str:
    """What tokens take where layers with a window have blocks of their own."""
    thousand, window = (size * 1000 // info.block_size for size in info.block_bytes)
    most = window * (info.reach + info.block_size) // 1000
    return f"a thousand tokens take {_size(thousand)}, and the window of a sequence up to {_size(most)}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GB" if num_bytes >= 1 << 30 else f"{round(num_bytes / (1 << 20))} MB"
