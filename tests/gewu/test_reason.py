"""Why a session was refused, in one sentence that names the model."""

import pytest

from kvloom.gewu.codes import Code
from kvloom.gewu.reason import why_refused


@pytest.mark.parametrize("code", [Code.INVAL, Code.NOENT, Code.NOMEM])
@pytest.mark.parametrize(
    "name", ["/tmp/" + "x" * 100_000_000, "é" * 1_000_000, "\0" * 100_000], ids=["long", "é", "NUL"]
)
def test_a_name_that_is_no_path_is_not_repeated_whole(name: str, code: Code):
    why = why_refused(code, name)
    assert len(why) < 200
    assert name[:80] in why


@pytest.mark.parametrize("code", [Code.NOENT, Code.NOMEM])
def test_a_path_is_named_whole(code: Code):
    path = "/nowhere/" + 50 * "folder/"
    assert path in why_refused(code, path)
