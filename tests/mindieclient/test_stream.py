"""A stream of events that arrives cut at any byte gives the same events."""

import pytest

from mindieclient.python.httpclient import MindIEClientException
from mindieclient.python.httpclient.stream import EventReader

EVENTS = (
    'data:{"text_output":"你"}\n\n: comment\n\ndata: {"text_output":"b"}\r\n\r\ndata:[DONE]\n\ndata:{"text_output":"c"}'
)


def test_cut_anywhere():
    data = EVENTS.encode()
    for cut in range(len(data) + 1):
        reader = EventReader()
        assert reader.feed(data[:cut]) + reader.feed(data[cut:]) + reader.finish() == ["你", "b", "c"]


@pytest.mark.parametrize(
    "line",
    [
        b"Engine callback timeout.\n",
        b'data:{"error":"x"}\n',
        b"data:{\n",
        b"data:[1]\n",
        b"data:" + b"[" * 99999 + b"\n",
    ],
)
def test_failures_are_raised(line):
    with pytest.raises(MindIEClientException):
        EventReader().feed(line)
