"""Checks a text against a grammar with the engine's guides."""

from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import EOS_ID, VOCAB_SIZE, ByteTokenizer
from kvloom.rank.grammar.guides import Guides
from kvloom.rank.grammar.reasoning import Guide

_guides = Guides(ByteTokenizer, VOCAB_SIZE)


def make_guide(grammar: str) -> Guide:
    guide = _guides.guide(SamplingParams(grammar=grammar))
    assert guide is not None
    return guide


def accepts(grammar: str, text: str) -> bool:
    """Whether an answer may be this text and end there."""
    guide = make_guide(grammar)
    for byte in text.encode():
        if not guide.mask()[byte]:
            return False
        guide.take(byte)
    return bool(guide.mask()[EOS_ID])
