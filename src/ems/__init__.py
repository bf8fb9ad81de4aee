"""EMS SDK: keep the KV cache of prefixes in a memory pool that outlives the engine (seed 000).

Ems.init(EmsConfig(cc_config=CcConfig(rank_id=0, device_id=0, model_id="m"))), then Ems.get_cc() for save and load.
"""

from ems.buffer import KvBufferWrapper
from ems.cc_v1.cc_config import CcConfig_v1, KVCacheType
from ems.common.exception import EmsErrorCode, EmsException
from ems.config import CcKvOption, CcResult, EmsConfig
from ems.context_caching import CcFuture, ContextCaching
from ems.ems import Ems, embedded

CcConfig = CcConfig_v1
ContextCache_v1 = ContextCaching

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
    "KvBufferWrapper",
    "embedded",
]
