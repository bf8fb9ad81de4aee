"""EmsConfig, CcKvOption and CcResult: parameters and results of the SDK's calls."""

import re
from dataclasses import dataclass

from ems.cc_v1.cc_config import LEGACY_ID, CcConfig_v1
from ems.common.exception import invalid_argument

LEGACY_DEFAULT_ACCESS_ID = LEGACY_ID
"""It breaks the documented character set; it means the default tenant."""

_ACCESS_ID = re.compile(r"[0-9a-z._-]{1,512}")
_ACCESS_KEY = re.compile(r"[0-9a-zA-Z+/=]{32,256}")
_MAX_TIMEOUT_MS = 2**32 - 1  # the wire's deadline field


class EmsConfig:
    """Configuration of `Ems.init` (spec ems 6.1).

    `cc_config`, `cc_config_v1` and `config` (table 6-1) are spellings of one attribute; giving several with different
    values is an error. It may also be the first argument alone, as in that table.
    access_id: 1..512 of [0-9a-z._-]; access_key: 32..256 of [0-9a-zA-Z+/=]. Both None or empty: the default tenant of
    an agent in open mode.
    """

    def __init__(
        self,
        access_id: "str | CcConfig_v1 | None" = None,
        access_key: str | None = None,
        cc_config: CcConfig_v1 | None = None,
        cc_config_v1: CcConfig_v1 | None = None,
        config: CcConfig_v1 | None = None,
    ) -> None:
        first = access_id if isinstance(access_id, CcConfig_v1) else None
        given = [each for each in (cc_config, cc_config_v1, config, first) if each is not None]
        if any(each != given[0] for each in given):
            raise invalid_argument("cc_config", "differs from cc_config_v1 or config; give only one of them")
        self.access_id = None if isinstance(access_id, CcConfig_v1) else access_id
        self.access_key = access_key
        self.cc_config = given[0] if given else None

    @property
    def cc_config_v1(self) -> CcConfig_v1 | None:
        return self.cc_config

    def validate(self) -> None:
        """Raises EmsException(EMS_INVALID_ARGUMENT) naming the first attribute out of its range."""
        if self.access_id not in (None, "", LEGACY_DEFAULT_ACCESS_ID) and not (
            isinstance(self.access_id, str) and _ACCESS_ID.fullmatch(self.access_id)
        ):
            raise invalid_argument("access_id", "must be 1 to 512 characters of 0-9 a-z . - _")
        if self.access_key not in (None, "") and not (
            isinstance(self.access_key, str) and _ACCESS_KEY.fullmatch(self.access_key)
        ):
            raise invalid_argument("access_key", "must be 32 to 256 characters of 0-9 a-z A-Z + / =")
        if not isinstance(self.cc_config, CcConfig_v1):
            raise invalid_argument("cc_config", "must be a CcConfig_v1")
        self.cc_config.validate()


@dataclass(slots=True)
class CcKvOption:
    """Options of one call (spec ems table 8-5). Mutable: callers raise `timeout` and retry.

    write_rcache: keep a local copy of blocks whose home is another node. read_local_only: never ask another node.
    timeout: ms from the call (for an asynchronous one, from its submission) to its end, 0..2**32-1; 0 is one attempt on
    the local agent without waiting for other nodes.
    """

    write_rcache: bool = True
    read_local_only: bool = False
    timeout: int = 5000

    def validate(self) -> None:
        """Raises EmsException(EMS_INVALID_ARGUMENT) naming the first attribute out of its range."""
        for name in ("write_rcache", "read_local_only"):
            if not isinstance(getattr(self, name), bool):
                raise invalid_argument(f"option.{name}", "must be a bool")
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, int):
            raise invalid_argument("option.timeout", "must be an integer, in ms")
        if not 0 <= self.timeout <= _MAX_TIMEOUT_MS:
            raise invalid_argument("option.timeout", f"must be 0 to {_MAX_TIMEOUT_MS} ms, got {self.timeout}")


def checked_option(option: object) -> CcKvOption:
    """A copy of a call's option, so that the caller may change it for a retry. Raises EMS_INVALID_ARGUMENT."""
    if not isinstance(option, CcKvOption):
        raise invalid_argument("option", "must be a CcKvOption; leave it out for the defaults")
    option.validate()
    return CcKvOption(option.write_rcache, option.read_local_only, option.timeout)


@dataclass(frozen=True, slots=True)
class CcResult:
    """success: blocks saved or loaded from the first on without a gap; total: blocks asked for. local: saved blocks
    that are only on this node, where other nodes do not find them, because their home was unreachable or too busy
    until the deadline.
    """

    success: int
    total: int
    local: int = 0
