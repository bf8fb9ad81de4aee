"""Classification heads: a linear layer behind the pooled state gives one number for each label."""

from collections.abc import Mapping
from typing import Any

from kvloom.checkpoints.embedding.dense import Dense
from kvloom.checkpoints.embedding.pooling import LAST, Embedding
from kvloom.checkpoints.families.values import count, short
from kvloom.checkpoints.safetensors import SafetensorsSource
from kvloom.contract.errors import ModelError

_MOST_LABELS = 1 << 16
_PROBLEMS = {
    "regression": "identity",
    "multi_label_classification": "sigmoid",
    "single_label_classification": "softmax",
}
_MODULES = {"Identity": "identity", "Sigmoid": "sigmoid", "Softmax": "softmax"}  # torch's


def decoder_classes(config: Mapping[str, Any], source: SafetensorsSource, num_states: int) -> Embedding:
    """The head of ...ForSequenceClassification over a decoder: `score` of the last token's state. Raises ModelError."""
    for key in ("classifier_pooling", "clf_pooling"):  # EuroBERT's: an MLP over all states
        if config.get(key) is not None:
            raise ModelError(f"configuration: {key} is not supported, got {short(config[key])}")
    labels = labels_of(config)
    score = Dense(source.floats("score.weight", (len(labels), num_states)))
    return Embedding(LAST, num_states, (score,), labels, activation_of(config, len(labels)))


def encoder_classes(config: Mapping[str, Any], source: SafetensorsSource, num_states: int, family: str) -> Embedding:
    """The head of ...ForSequenceClassification over an encoder: two layers over the first token's state. Raises
    ModelError.
    """
    labels = labels_of(config)
    pooler = {"bert": "bert.pooler.dense", "nomic-bert": "nomic_bert.pooler.dense"}.get(family)
    first, last = (pooler, "classifier") if pooler else ("classifier.dense", "classifier.out_proj")
    layers = (
        _layer(source, first, (num_states, num_states), "Tanh"),
        _layer(source, last, (len(labels), num_states), "Identity"),
    )
    return Embedding("cls", num_states, layers, labels, activation_of(config, len(labels)))


def _layer(source: SafetensorsSource, name: str, shape: tuple[int, int], activation: str) -> Dense:
    return Dense(source.floats(f"{name}.weight", shape), source.floats(f"{name}.bias", shape[:1]), activation)


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels in order. Raises ModelError when the keys of id2label are not the numbers from 0 on."""
    named = config.get("id2label")
    if named is None:
        num_labels = min(count(config, "num_labels", 2), _MOST_LABELS)
        return tuple(f"LABEL_{index}" for index in range(num_labels))
    if not isinstance(named, Mapping) or not named or set(named) != {str(index) for index in range(len(named))}:
        raise ModelError(f"configuration: id2label must name labels by numbers from 0 on, got {short(named)}")
    return tuple(str(named[str(index)]) for index in range(len(named)))


def activation_of(config: Mapping[str, Any], num_labels: int) -> str:
    """The activation that turns a head's numbers into scores: sentence-transformers' entry, else by problem type, else
    by the number of labels.
    """
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, Mapping) else None
    named = named or config.get("sbert_ce_default_activation_function")
    if named is not None:
        name = str(named).rsplit(".", 1)[-1]
        if name not in _MODULES:
            raise ModelError(f"configuration: activation_fn must be one of {', '.join(_MODULES)}, got {short(named)}")
        return _MODULES[name]
    return _PROBLEMS.get(str(config.get("problem_type")), "sigmoid" if num_labels == 1 else "softmax")
