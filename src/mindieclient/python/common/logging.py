"""The name under which later versions of the client publish `Log`."""

from mindieclient.python.common.log import Log

__all__ = ["Log"]
