"""Checks a text against a grammar with the engine's guides."""

from kvloom.contract.sampling import SamplingParams
from kvloom.rank.fake import EOS_ID, VOCAB_SIZE, ByteTokenizer
from kvloom.rank.grammar.guides import Guides

_guides = Guides(ByteTokenizer, VOCAB_SIZE)


def accepts(grammar: str, text: str) -> bool:
    """Whether an answer may be this text and end there."""
    guide = _guides.guide(SamplingParams(grammar=grammar))
    assert guide is not None
    for byte in text.encode():
        if not guide.mask()[byte]:
            return False
        guide.take(byte)
    return bool(guide.mask()[EOS_ID])
