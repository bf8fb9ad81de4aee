"""Numbers in texts that others write. Pure."""

_MAX_DIGITS = 20


def whole(text: str, most: int = 2**63 - 1) -> int | None:
    """What plain decimal digits say, 0 to `most`; None for all else.

    int() takes signs, blanks, underscores and the digits of every script, and raises for some that str.isdigit knows.
    """
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        return None
    number = int(text)
    return number if number <= most else None
