"""Sampler: logits to tokens. A row's token depends on its own logits, history, parameters and seed, never on the batch.

Order of the rules: penalties, bias, minimum length, watermark, temperature, top-k, typical-p, top-p, min-p; tokens that
the grammar rules out never come. The random number is a function of (seed, position), so a sequence that is preempted
and computed again continues with the same tokens.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvloom.contract.messages import Logprob
from kvloom.contract.sampling import SamplingParams
from kvloom.rank.grammar.reasoning import Guide
from kvloom.rank.kernels.backend import Draw, Floats, Ids, most_likely

# most logits of a row that a step hands over as candidates; a request that may need more gets all of them
MAX_TOP = 128
_NUM_CANDIDATES = 1024  # most likely tokens examined first; the whole vocabulary is sorted only if they are too few
_POINTS_AHEAD = 32  # random numbers made at once: one takes as long as all of them
# lowest repetition penalty that is applied: with it seen tokens are far ahead already, and logits stay within float32
_LEAST_PENALTY = 1e-6
_WATERMARK_GREEN = 0.5  # fraction of the vocabulary that is favoured (gamma of Kirchenbauer et al. 2023)
_WATERMARK_BIAS = 2.0  # added to its logits (delta)


Choice = tuple[float, float, float, int, int]  # of kernels.backend.CHOICE


@dataclass(slots=True)
class History:
    """A sequence's state in the sampler."""

    token_ids: list[int]  # prompt, then answer
    num_prompt: int
    params: SamplingParams
    seed: int
    counts: dict[int, int] = field(default_factory=dict)  # counts of the answer's tokens
    guide: Guide | None = None  # what the answer's grammar allows
    _bias: tuple[Ids, Floats] | None = None
    _points: Sequence[float] = ()
    _first_point: int = 0  # position of the first of them

    def bias(self) -> tuple[Ids, Floats]:
        """(token ids, their logit biases), made once: converting a dictionary of a whole vocabulary takes a second."""
        if self._bias is None:
            given = self.params.logit_bias
            ids = np.fromiter(given.keys(), np.int64, len(given))
            self._bias = ids, np.fromiter(given.values(), np.float32, len(given))
        return self._bias

    def point(self) -> float:
        """The random number in [0, 1) of the next token: uniforms(seed, its position)."""
        position = len(self.token_ids)
        if not 0 <= position - self._first_point < len(self._points):
            self._points, self._first_point = uniforms(self.seed, position, _POINTS_AHEAD), position
        return self._points[position - self._first_point]

    def append(self, token_id: int) -> None:
        """The token was chosen as the next one."""
        if self.guide is not None:
            self.guide.take(token_id)
        self.token_ids.append(token_id)
        self.counts[token_id] = self.counts.get(token_id, 0) + 1


def num_candidates(row: History, num_eos: int, num_more: int = 0) -> int:
    """How many of the largest logits surely contain the next token; 0 = all logits are needed.

    A penalty only lowers logits, and only those of tokens seen. So the best token after penalties is among the best
    before them, plus as many more as there are seen tokens. `num_more` tokens may be added to the history until then.
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


def choice_of(row: History, top: int) -> Choice | None:
    """Parameters by which a backend can choose the next token itself from num_candidates `top`; None = it cannot.

    Once it can for a sequence, it always can.
    """
    params = row.params
    is_cut = bool(params.typical_p < 1 or row.guide is not None or (params.top_k and not top))
    is_changed = bool(params.logit_bias or params.watermark or _is_adjusted(row))
    if is_cut or is_changed or params.logprobs is not None or (params.is_greedy and top != 1):
        return None
    temperature = 0.0 if params.is_greedy else params.temperature
    return temperature, params.top_p, params.min_p, row.seed % 2**64, len(row.token_ids)


def sample(
    logits: Floats, row: History, eos_ids: Sequence[int], draw: Draw | None = None
) -> tuple[int, Logprob | None]:
    """The next token of a sequence, with its log-probability if asked for.

    logits [vocab] float32, changed in place; log-probabilities are of the logits as given. `draw` replaces draw_plain.
    """
    params = row.params
    logprobs = None if params.logprobs is None else log_softmax(logits)
    _adjust(logits, row, eos_ids)
    ids, logits = _allowed(logits, row)
    index = int(logits.argmax()) if params.is_greedy else _draw(logits, row, draw or draw_plain)
    token_id = index if ids is None else int(ids[index])
    return token_id, None if logprobs is None else describe(
        logprobs, token_id, params.logprobs or 0, params.logprob_ids
    )


def sample_top(values: Floats, ids: Ids, row: History, eos_ids: Sequence[int], draw: Draw | None = None) -> int:
    """The token that `sample` would choose from all logits, chosen from the num_candidates(row) largest.

    values [n] float32, largest first, smaller id first among equals; changed in place. ids [n].
    """
    params = row.params
    if _is_adjusted(row):
        ascending = np.argsort(ids)
        ids, values = ids[ascending], values[ascending]
        _adjust(values, row, eos_ids, {id: index for index, id in enumerate(ids.tolist())})
        values, order = most_likely(values, min(1 if params.is_greedy else params.top_k, len(ids)))
        ids = ids[order]
    return int(ids[0]) if params.is_greedy else _draw_top(values, ids, row, draw or draw_plain)


def _is_adjusted(row: History) -> bool:
    """Whether a rule changes the logits of a request with candidates; see num_candidates."""
    params = row.params
    is_penalised = params.repetition_penalty != 1.0 or bool(params.frequency_penalty or params.presence_penalty)
    return is_penalised or _is_too_short(row)


def _allowed(logits: Floats, row: History) -> tuple[Ids | None, Floats]:
    """(ids, logits) of the tokens that the grammar allows, usually few; None = all.

    Ends of the answer, ruled out by its minimum length, are allowed again when nothing else is left.
    """
    mask = None if row.guide is None else row.guide.mask()
    if mask is None:
        return None, logits
    ids = np.flatnonzero(mask)
    logits = logits[ids]
    if _is_too_short(row) and logits.max() == -np.inf:
        logits = np.zeros_like(logits)
    return ids, logits


def _is_too_short(row: History) -> bool:
    """Whether the answer is shorter than its minimum length, so that it must not end."""
    return len(row.token_ids) - row.num_prompt < row.params.min_tokens


def describe(logprobs: Floats, token_id: int, num_top: int, also: Sequence[int] = ()) -> Logprob:
    """Log-probabilities of one token, of the `num_top` most likely, and then of `also`. logprobs [vocab]."""
    top: list[tuple[int, float]] = []
    if num_top:
        values, ids = most_likely(logprobs, num_top)
        top = list(zip(ids.tolist(), values.tolist(), strict=True))
    return Logprob(token_id, float(logprobs[token_id]), top + [(id, float(logprobs[id])) for id in also])


def log_softmax(logits: Floats) -> Floats:
    """Of the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    logprobs: Floats = shifted - np.log(total).astype(np.float32)
    return logprobs


def _softmax(logits: Floats) -> Floats:
    weights: Floats = np.exp(logits - logits.max())
    weights /= np.float32(weights.sum(dtype=np.float64))
    return weights


def uniforms(seed: int, position: int, count: int = 1) -> list[float]:
    """Numbers in [0, 1) for `count` positions from `position`, each a function of the seed and its position.

    Philox (Salmon et al. 2011) gives four 64-bit numbers a position; the first one is used.
    """
    numbers = np.random.Philox(key=seed % 2**64, counter=position).random_raw(4 * count)[::4]
    values: list[float] = ((numbers >> np.uint64(11)) * 2.0**-53).tolist()
    return values


def _adjust(logits: Floats, row: History, eos_ids: Sequence[int], index_of: Mapping[int, int] | None = None) -> None:
    """Apply penalties, bias, minimum length and watermark in place.

    logits [n]; `index_of`: token id -> index of its logit, for the tokens present; None = every token, at its id.
    """
    params = row.params
    if params.repetition_penalty != 1.0:  # Keskar et al. 2019: prompt and answer alike
        seen = _indices_of(set(row.token_ids), index_of)
        values, penalty = logits[seen], max(params.repetition_penalty, _LEAST_PENALTY)
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if row.counts and (params.frequency_penalty or params.presence_penalty):
        counted = row.counts if index_of is None else {i: n for i, n in row.counts.items() if i in index_of}
        counts = np.fromiter(counted.values(), np.float32, len(counted))
        logits[_indices_of(counted, index_of)] -= params.frequency_penalty * counts + params.presence_penalty
    if params.logit_bias:
        ids, bias = row.bias()
        logits[ids] += bias
    if _is_too_short(row):
        logits[_indices_of([*eos_ids, *params.stop_token_ids], index_of)] = -np.inf
    if params.watermark:
        generator = np.random.Generator(np.random.Philox(key=row.token_ids[-1]))
        green = generator.permutation(logits.shape[0])[: int(_WATERMARK_GREEN * logits.shape[0])]
        logits[green] += _WATERMARK_BIAS


def _indices_of(token_ids: Collection[int], index_of: Mapping[int, int] | None) -> Ids:
    found = token_ids if index_of is None else [index_of[i] for i in token_ids if i in index_of]
    return np.fromiter(found, np.int64, len(found))


def draw_plain(logits: Floats, temperature: float, top_p: float, min_p: float, point: float) -> int:
    """A random token by temperature, top-p and min-p; see kernels.backend.Draw. logits [vocab]."""
    return _draw_cut(logits, SamplingParams(temperature=temperature, top_p=top_p, min_p=min_p), point)


def _draw(logits: Floats, row: History, draw: Draw) -> int:
    """Draw a token of the distribution that the parameters leave. logits [vocab]."""
    params = row.params
    if params.top_k:
        return _draw_top(*most_likely(logits, min(params.top_k, logits.shape[0])), row, draw)
    if params.typical_p < 1:
        return _draw_cut(logits, params, row.point())
    return draw(logits, params.temperature, params.top_p, params.min_p, row.point())


def _draw_cut(logits: Floats, params: SamplingParams, point: float) -> int:
    """Draw without top-k: examines the most likely tokens first, and all only when those are too few."""
    probs = _softmax(logits / params.temperature)
    vocab = logits.shape[0]
    if params.typical_p < 1:
        typical = _typical(probs, params.typical_p)
        values, order = most_likely(probs[typical], len(typical))
        return _pick(_all_kept(values, params), typical[order], point)
    if params.top_p >= 1 and params.min_p <= 0:
        return _pick(probs, None, point)
    for count in (min(_NUM_CANDIDATES, vocab), vocab):
        values, ids = most_likely(probs, count)
        kept = _truncate(values, params, is_all=count == vocab)
        if kept is not None:
            return _pick(kept, ids, point)
    raise AssertionError("the whole vocabulary is always enough")


def _draw_top(logits: Floats, ids: Ids, row: History, draw: Draw) -> int:
    """Draw one of the top-k tokens. logits, ids [k], most likely first."""
    params = row.params
    if params.typical_p >= 1:
        return int(ids[draw(logits, params.temperature, params.top_p, params.min_p, row.point())])
    probs = _softmax(logits / params.temperature)
    typical = _typical(probs, params.typical_p)
    return _pick(_all_kept(probs[typical], params), ids[typical], row.point())


def _all_kept(probs: Floats, params: SamplingParams) -> Floats:
    kept = _truncate(probs, params, is_all=True)
    assert kept is not None, "these are all that can be kept"
    return kept


def _truncate(probs: Floats, params: SamplingParams, is_all: bool) -> Floats | None:
    """Set the probabilities (descending) of tokens that top-p and min-p rule out to 0.

    None when tokens beyond these may have to be kept (`is_all` False).
    """
    if params.top_p < 1:
        total = probs.sum() if is_all else 1.0
        before = _before(probs)
        if not is_all and float(before[-1] + probs[-1]) < params.top_p:
            return None
        probs = np.where(_within(before, params.top_p * total), probs, np.float32(0))
    if params.min_p > 0:
        low = params.min_p * probs.max()
        if not is_all and params.top_p >= 1 and bool(probs[-1] >= low):
            return None
        probs = np.where(probs >= low, probs, np.float32(0))
    elif not is_all and params.top_p >= 1:
        return None
    return probs


def _before(probs: Floats) -> Floats:
    """For each entry, the sum of all before it."""
    return np.cumsum(probs, dtype=np.float64).astype(np.float32) - probs


def _within(before: Floats, mass: float) -> NDArray[np.bool_]:
    """Which tokens make up the mass: those before which less than `mass` stands, and always the first."""
    within: NDArray[np.bool_] = (before < mass) | (before == 0)
    return within


def _typical(probs: Floats, mass: float) -> Ids:
    """Ids, ascending, of the tokens whose information is nearest to the entropy and that make up `mass` (Meister et al.
    2022).

    Examines the nearest first, and all only when those are too few.
    """
    information = -np.log(np.maximum(probs, np.float32(1e-30)))
    distance = np.abs(information - (probs * information).sum())
    nearest = np.arange(len(probs))
    if len(probs) > _NUM_CANDIDATES:  # of equally near tokens all or none
        nearest = np.flatnonzero(distance < np.partition(distance, _NUM_CANDIDATES)[_NUM_CANDIDATES])
    while True:
        order = nearest[np.argsort(distance[nearest], stable=True)]
        within = _within(_before(probs[order]), mass)
        if not within.all() or len(order) == len(probs):
            return np.sort(order[within])
        nearest = np.arange(len(probs))


def _pick(weights: Floats, ids: Ids | None, point: float) -> int:
    """The entry where the cumulative weights reach `point`; entries of weight 0 are never picked."""
    cumulative = np.cumsum(weights, dtype=np.float64)
    index = int(np.searchsorted(cumulative, point * cumulative[-1], side="right"))
    index = min(index, int(np.flatnonzero(weights)[-1]))
    return index if ids is None else int(ids[index])
