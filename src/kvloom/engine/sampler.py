"""Sampler: logits to tokens. A row's token depends on its own logits, history, parameters and seed, never on the batch.

Order of the rules, as users know it elsewhere: penalties, bias, minimum length, watermark, temperature, top-k,
typical-p, top-p, min-p. Randomness is a function of (seed, position), so a sequence that is preempted and computed
again continues with the same tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvloom.engine.batch import Logprob
from kvloom.engine.request import SamplingParams

_NUM_CANDIDATES = 1024  # most likely tokens looked at first; the whole vocabulary is sorted only when they are too few
_WATERMARK_GREEN = 0.5  # share of the vocabulary that is favoured (gamma of Kirchenbauer et al. 2023)
_WATERMARK_BIAS = 2.0  # added to its logits (delta)


@dataclass(slots=True)
class History:
    """What the sampler must know of a sequence."""

    token_ids: list[int]  # prompt, then answer
    num_prompt: int
    params: SamplingParams
    seed: int
    counts: dict[int, int] = field(default_factory=dict)  # of the answer's tokens

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.counts[token_id] = self.counts.get(token_id, 0) + 1


def sample(logits: torch.Tensor, rows: Sequence[History], eos_ids: Sequence[int]) -> list[tuple[int, Logprob | None]]:
    """The next token of each row, with log-probabilities where asked for.

    logits [len(rows), vocab] float32; changed in place. Log-probabilities are of the logits as they come in.
    """
    logprobs = [_logprobs_of(logits[i], row.params.logprobs) for i, row in enumerate(rows)]
    for i, row in enumerate(rows):
        _adjust(logits[i], row, eos_ids)
    best = logits.argmax(dim=-1).tolist() if any(row.params.is_greedy for row in rows) else []
    chosen = [best[i] if row.params.is_greedy else _draw(logits[i], row) for i, row in enumerate(rows)]
    return [
        (token_id, None if values is None else describe(values, token_id, row.params.logprobs or 0))
        for token_id, values, row in zip(chosen, logprobs, rows, strict=True)
    ]


def describe(logprobs: torch.Tensor, token_id: int, num_top: int) -> Logprob:
    """Log-probability of one token and of the `num_top` most likely ones. logprobs [vocab]."""
    top: list[tuple[int, float]] = []
    if num_top:
        values, ids = logprobs.topk(num_top)
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return Logprob(token_id, float(logprobs[token_id]), top)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments (Philox, Salmon et al. 2011)."""
    return float(np.random.Generator(np.random.Philox(key=seed % 2**64, counter=position)).random())


def _logprobs_of(logits: torch.Tensor, wanted: int | None) -> torch.Tensor | None:
    return None if wanted is None else torch.log_softmax(logits, dim=-1)


def _adjust(logits: torch.Tensor, row: History, eos_ids: Sequence[int]) -> None:
    """Penalties, bias, minimum length and watermark, in place. logits [vocab]."""
    params = row.params
    if params.repetition_penalty != 1.0:  # Keskar et al. 2019: prompt and answer alike
        seen = torch.tensor(sorted(set(row.token_ids)), device=logits.device)
        values = logits[seen]
        scaled = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        logits[seen] = scaled
    if row.counts and (params.frequency_penalty or params.presence_penalty):
        ids = torch.tensor(list(row.counts), device=logits.device)
        counts = torch.tensor(list(row.counts.values()), dtype=logits.dtype, device=logits.device)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if len(row.token_ids) - row.num_prompt < params.min_tokens:
        logits[[*eos_ids, *params.stop_token_ids]] = -torch.inf
    if params.watermark:
        generator = np.random.Generator(np.random.Philox(key=row.token_ids[-1]))
        green = generator.permutation(logits.shape[0])[: int(_WATERMARK_GREEN * logits.shape[0])]
        logits[torch.from_numpy(green).to(logits.device)] += _WATERMARK_BIAS


def _draw(logits: torch.Tensor, row: History) -> int:
    """A random token of the distribution that the parameters leave. logits [vocab]."""
    params = row.params
    point = uniform(row.seed, len(row.token_ids))
    probs = torch.softmax(logits / params.temperature, dim=-1)
    is_whole = params.top_p >= 1 and params.typical_p >= 1 and params.min_p <= 0 and params.top_k == 0
    if is_whole:
        return _pick(probs, None, point)
    vocab = probs.shape[0]
    for count in (min(_NUM_CANDIDATES, vocab), vocab):
        values, ids = probs.topk(count)
        kept = _truncate(values, params, is_all=count == vocab)
        if kept is not None:
            return _pick(kept, ids, point)
    raise AssertionError("the whole vocabulary is always enough")


def _truncate(probs: torch.Tensor, params: SamplingParams, is_all: bool) -> torch.Tensor | None:
    """Probabilities of the most likely tokens (descending) with those ruled out set to 0.

    None when tokens beyond these may have to be kept (`is_all` False).
    """
    if params.top_k and params.top_k <= probs.shape[0]:
        probs, is_all = probs[: params.top_k], True
        probs = probs / probs.sum()
    if params.typical_p < 1:
        if not is_all:
            return None
        probs = _typical(probs, params.typical_p)
    if params.top_p < 1:
        total = probs.sum() if is_all else 1.0
        before = torch.cumsum(probs, dim=-1) - probs
        if not is_all and float(before[-1] + probs[-1]) < params.top_p:
            return None
        probs = torch.where(before < params.top_p * total, probs, 0.0)
    if params.min_p > 0:
        low = params.min_p * probs.max()
        if not is_all and params.top_p >= 1 and bool(probs[-1] >= low):
            return None
        probs = torch.where(probs >= low, probs, 0.0)
    elif not is_all and params.top_p >= 1:
        return None
    return probs


def _typical(probs: torch.Tensor, mass: float) -> torch.Tensor:
    """Keep the tokens whose information is nearest to the entropy (Meister et al. 2022)."""
    information = -torch.log(probs.clamp_min(1e-30))
    entropy = (probs * information).sum()
    order = torch.argsort((information - entropy).abs(), stable=True)
    before = torch.cumsum(probs[order], dim=-1) - probs[order]
    kept = torch.zeros_like(probs)
    chosen = order[before < mass]
    kept[chosen] = probs[chosen]
    return kept


def _pick(weights: torch.Tensor, ids: torch.Tensor | None, point: float) -> int:
    """The entry at `point` of the cumulative weights; entries of weight 0 are never picked."""
    cumulative = torch.cumsum(weights.double(), dim=-1)
    index = int(torch.searchsorted(cumulative, point * float(cumulative[-1]), right=True))
    index = min(index, int(weights.nonzero()[-1]))
    return index if ids is None else int(ids[index])
