"""Sampler: logits to tokens. A row's token depends on its own logits, history, parameters and seed, never on the batch.

Order of the rules, as users know it elsewhere: penalties, bias, minimum length, watermark, temperature, top-k,
typical-p, top-p, min-p; what the grammar rules out never comes. Randomness is a function of (seed, position), so a
sequence that is preempted and computed again continues with the same tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from kvloom.engine.batch import Logprob
from kvloom.engine.kernels.backend import Draw, most_likely
from kvloom.engine.reasoning_guide import Guide
from kvloom.engine.request import SamplingParams

MAX_TOP = 128  # logits of a row that a step hands over as candidates; a request that may need more gets all of them
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
    guide: Guide | None = None  # what the answer's grammar allows

    def append(self, token_id: int) -> None:
        if self.guide is not None:
            self.guide.take(token_id)
        self.token_ids.append(token_id)
        self.counts[token_id] = self.counts.get(token_id, 0) + 1


def num_candidates(row: History, num_eos: int, num_more: int = 0) -> int:
    """How many of the largest logits surely hold the next token; 0 = all logits are needed.

    A penalty only lowers logits, and at most those of the tokens seen: so what is best after it was before it among the
    best and as many more as there are such tokens. `num_more` tokens may be added to the history until then.
    """
    params = row.params
    count = 1 if params.is_greedy else params.top_k
    may_raise = params.repetition_penalty < 1 or params.frequency_penalty < 0 or params.presence_penalty < 0
    if row.guide is not None and not row.guide.is_free(num_more):
        return 0
    if not 0 < count <= MAX_TOP or params.logprobs is not None or params.logit_bias or params.watermark or may_raise:
        return 0
    if params.repetition_penalty != 1.0:
        count += len(set(row.token_ids)) + num_more
    elif params.frequency_penalty or params.presence_penalty:
        count += len(row.counts) + num_more
    if _is_too_short(row):
        count += num_eos + len(params.stop_token_ids)
    return count if count <= MAX_TOP else 0


def sample(
    logits: torch.Tensor | Sequence[torch.Tensor],
    rows: Sequence[History],
    eos_ids: Sequence[int],
    draw: Draw | None = None,
) -> list[tuple[int, Logprob | None]]:
    """The next token of each row, with log-probabilities where asked for.

    logits: one [vocab] float32 a row; changed in place. Log-probabilities are of the logits as they come in. `draw`
    replaces draw_plain.
    """
    return [_sample_row(logits[i], row, eos_ids, draw or draw_plain) for i, row in enumerate(rows)]


def sample_top(
    values: torch.Tensor, ids: torch.Tensor, row: History, eos_ids: Sequence[int], draw: Draw | None = None
) -> int:
    """What `sample` would choose from all logits, chosen from the num_candidates(row) largest.

    values [n] float32, largest first, of equal ones the smaller id first; changed in place. ids [n].
    """
    params = row.params
    if _is_adjusted(row):
        ids, order = ids.sort()
        values = values[order]
        _adjust(values, row, eos_ids, {id: place for place, id in enumerate(ids.tolist())})
        values, places = most_likely(values, min(1 if params.is_greedy else params.top_k, len(ids)))
        ids = ids[places]
    return int(ids[0]) if params.is_greedy else _draw_top(values, ids, row, draw or draw_plain)


def _is_adjusted(row: History) -> bool:
    """Whether a rule of a request with candidates changes logits; see num_candidates."""
    params = row.params
    is_penalised = params.repetition_penalty != 1.0 or bool(params.frequency_penalty or params.presence_penalty)
    return is_penalised or _is_too_short(row)


def _sample_row(logits: torch.Tensor, row: History, eos_ids: Sequence[int], draw: Draw) -> tuple[int, Logprob | None]:
    params = row.params
    logprobs = None if params.logprobs is None else torch.log_softmax(logits, dim=-1)
    _adjust(logits, row, eos_ids)
    ids, logits = _allowed(logits, row)
    place = int(logits.argmax()) if params.is_greedy else _draw(logits, row, draw)
    token_id = place if ids is None else int(ids[place])
    return token_id, None if logprobs is None else describe(logprobs, token_id, params.logprobs or 0)


def _allowed(logits: torch.Tensor, row: History) -> tuple[torch.Tensor | None, torch.Tensor]:
    """(ids, their logits) of the tokens that the grammar allows; None = all. Mostly they are few.

    What the answer's least length ruled out is back when nothing else is left.
    """
    mask = None if row.guide is None else row.guide.mask()
    if mask is None:
        return None, logits
    ids = torch.from_numpy(mask.nonzero()[0]).to(logits.device)
    logits = logits[ids]
    if _is_too_short(row) and logits.max() == -torch.inf:
        logits = torch.zeros_like(logits)
    return ids, logits


def _is_too_short(row: History) -> bool:
    """Whether the answer has not reached its least length, so that it must not end."""
    return len(row.token_ids) - row.num_prompt < row.params.min_tokens


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


def _adjust(
    logits: torch.Tensor, row: History, eos_ids: Sequence[int], places: Mapping[int, int] | None = None
) -> None:
    """Penalties, bias, minimum length and watermark, in place.

    logits [n]; `places`: where a token's logit is, for tokens that have one; None = every token's at its id.
    """
    params = row.params
    if params.repetition_penalty != 1.0:  # Keskar et al. 2019: prompt and answer alike
        seen = torch.tensor(_places_of(sorted(set(row.token_ids)), places), dtype=torch.int64, device=logits.device)
        values = logits[seen]
        scaled = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        logits[seen] = scaled
    if row.counts and (params.frequency_penalty or params.presence_penalty):
        counted = row.counts.items() if places is None else [(i, n) for i, n in row.counts.items() if i in places]
        ids = torch.tensor(_places_of([i for i, _ in counted], places), dtype=torch.int64, device=logits.device)
        counts = torch.tensor([n for _, n in counted], dtype=logits.dtype, device=logits.device)
        logits[ids] -= params.frequency_penalty * counts + params.presence_penalty
    for token_id, bias in params.logit_bias.items():
        logits[token_id] += bias
    if _is_too_short(row):
        logits[_places_of([*eos_ids, *params.stop_token_ids], places)] = -torch.inf
    if params.watermark:
        generator = np.random.Generator(np.random.Philox(key=row.token_ids[-1]))
        green = generator.permutation(logits.shape[0])[: int(_WATERMARK_GREEN * logits.shape[0])]
        logits[torch.from_numpy(green).to(logits.device)] += _WATERMARK_BIAS


def _places_of(token_ids: list[int], places: Mapping[int, int] | None) -> list[int]:
    return token_ids if places is None else [places[i] for i in token_ids if i in places]


def draw_plain(logits: torch.Tensor, temperature: float, top_p: float, min_p: float, point: float) -> int:
    """A random token by temperature, top-p and min-p; see kernels.backend.Draw. logits [vocab]."""
    return _draw_cut(logits, SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p), point)


def _draw(logits: torch.Tensor, row: History, draw: Draw) -> int:
    """A random token of the distribution that the parameters leave. logits [vocab]."""
    params = row.params
    if params.top_k:
        return _draw_top(*most_likely(logits, min(params.top_k, logits.shape[0])), row, draw)
    point = uniform(row.seed, len(row.token_ids))
    if params.typical_p < 1:
        return _draw_cut(logits, params, point)
    return draw(logits, params.temperature, params.top_p, params.min_p, point)


def _draw_cut(logits: torch.Tensor, params: SamplingParams, point: float) -> int:
    """Without top-k: looks at the most likely tokens first, and at all of them only when those are too few."""
    probs = torch.softmax(logits / params.temperature, dim=-1)
    vocab = logits.shape[0]
    if params.top_p >= 1 and params.typical_p >= 1 and params.min_p <= 0:
        return _pick(probs, None, point)
    for count in (min(_NUM_CANDIDATES, vocab), vocab):
        values, ids = probs.topk(count)
        kept = _truncate(values, params, is_all=count == vocab)
        if kept is not None:
            return _pick(kept, ids, point)
    raise AssertionError("the whole vocabulary is always enough")


def _draw_top(logits: torch.Tensor, ids: torch.Tensor, row: History, draw: Draw) -> int:
    """A random token of the top-k ones. logits, ids [k], most likely first."""
    params, point = row.params, uniform(row.seed, len(row.token_ids))
    if params.typical_p >= 1:
        return int(ids[draw(logits, params.temperature, params.top_p, params.min_p, point)])
    kept = _truncate(torch.softmax(logits / params.temperature, dim=-1), params, is_all=True)
    assert kept is not None, "these are all that can be kept"
    return _pick(kept, ids, point)


def _truncate(probs: torch.Tensor, params: SamplingParams, is_all: bool) -> torch.Tensor | None:
    """Probabilities of the most likely tokens (descending) with those ruled out set to 0.

    None when tokens beyond these may have to be kept (`is_all` False).
    """
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
