"""Fills in sampling parameters that a request does not set with those that the model's makers recommend."""

from dataclasses import fields, replace

import msgspec

from kvloom.contract.request import SamplingAdvice, SamplingParams
from kvloom.server.serving.service import GenerationService

_NAMES = tuple(field.name for field in fields(SamplingAdvice))


def advised(
    params: SamplingParams, body: msgspec.Struct, service: GenerationService, **other_names: str
) -> SamplingParams:
    """`params` with the model's sampling advice for every parameter that `body` does not set.

    `other_names`: names in `body` that differ from SamplingAdvice's fields.
    """
    taken = {
        name: value
        for name in _NAMES
        if (value := getattr(service.card.advice, name)) is not None
        and getattr(body, other_names.get(name, name), None) is None
    }
    return replace(params, **taken) if taken else params
