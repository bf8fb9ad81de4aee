"""EMS SDK: keep the KV cache of prefixes in a memory pool that outlives the engine (docs/spec/ems.md).

Ems.init(EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="m"))), then Ems.get_cc() for save and load.
Names are loaded at their first use: the node agent shares the wire of this package and does without the rest.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ems.buffer import KvBufferWrapper
    from ems.cc_v1.cc_config import CcConfig_v1, KVCacheType
    from ems.cc_v1.cc_config import CcConfig_v1 as CcConfig
    from ems.common.exception import EmsErrorCode, EmsException
    from ems.config import CcKvOption, CcResult, EmsConfig
    from ems.context_caching import CcFuture, ContextCaching
    from ems.context_caching import ContextCaching as ContextCache_v1
    from ems.ems import Ems, embedded, open_pool
    from ems.values.memory import KvBuffer
    from ems.values.moving import KvStatus
    from ems.values.pool import KvPool

_HOMES = {
    "CcConfig": ("ems.cc_v1.cc_config", "CcConfig_v1"),
    "CcConfig_v1": ("ems.cc_v1.cc_config", "CcConfig_v1"),
    "CcFuture": ("ems.context_caching", "CcFuture"),
    "CcKvOption": ("ems.config", "CcKvOption"),
    "CcResult": ("ems.config", "CcResult"),
    "ContextCache_v1": ("ems.context_caching", "ContextCaching"),
    "ContextCaching": ("ems.context_caching", "ContextCaching"),
    "Ems": ("ems.ems", "Ems"),
    "EmsConfig": ("ems.config", "EmsConfig"),
    "EmsErrorCode": ("ems.common.exception", "EmsErrorCode"),
    "EmsException": ("ems.common.exception", "EmsException"),
    "KVCacheType": ("ems.cc_v1.cc_config", "KVCacheType"),
    "KvBuffer": ("ems.values.memory", "KvBuffer"),
    "KvBufferWrapper": ("ems.buffer", "KvBufferWrapper"),
    "KvPool": ("ems.values.pool", "KvPool"),
    "KvStatus": ("ems.values.moving", "KvStatus"),
    "embedded": ("ems.ems", "embedded"),
    "open_pool": ("ems.ems", "open_pool"),
}

__all__ = [
    "CcConfig",
    "CcConfig_v1",
    "CcFuture",
    "CcKvOption",
    "CcResult",
    "ContextCache_v1",
    "ContextCaching",
    "Ems",
    "EmsConfig",
    "EmsErrorCode",
    "EmsException",
    "KVCacheType",
    "KvBuffer",
    "KvBufferWrapper",
    "KvPool",
    "KvStatus",
    "embedded",
    "open_pool",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'ems' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    value: object = getattr(importlib.import_module(module), attribute)
    globals()[name] = value
    return value
