"""Names as other programs can read them."""


def is_text(value: object) -> bool:
    """Whether it is a string that UTF-8 can carry, as names need: without halves of surrogate pairs."""
    return isinstance(value, str) and value.encode(errors="replace").decode() == value
