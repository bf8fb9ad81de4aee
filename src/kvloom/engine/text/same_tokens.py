"""Whether two models have one vocabulary: what a draft model guesses must mean the same to the model that checks it."""

from kvloom.contract.errors import ModelError
from kvloom.engine.text.tokenizer import Tokenizer


def check_same_tokens(tokenizer: Tokenizer, draft: Tokenizer, name: str) -> None:
    """Raises ModelError that names the first token in which the vocabulary of the draft model `name` differs.

    Added tokens may differ, and one vocabulary may be longer: guesses that only one of them has are not drafted.
    """
    for token_id in range(min(tokenizer.vocab_size, draft.vocab_size)):
        own, other = tokenizer.token_text(token_id), draft.token_text(token_id)
        is_added = tokenizer.is_added(token_id) or draft.is_added(token_id)
        if own != other and own and other and not is_added:
            raise ModelError(
                f"draft_model: {name} has another vocabulary: token {token_id} is {other!r} there and {own!r} here"
            )
