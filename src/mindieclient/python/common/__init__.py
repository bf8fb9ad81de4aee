"""Helpers that the client's samples use besides the client."""

from mindieclient.python.common.log import Log

__all__ = ["Log"]
