"""CcConfig_v1: who this process is within its model instance (seed 000, table 6-2)."""

import re
from dataclasses import dataclass
from enum import Enum

from ems.common.exception import invalid_argument

_MODEL_ID = re.compile(r"[0-9a-z._-]{1,512}")


class KVCacheType(str, Enum):  # noqa: UP042 (str(KVCacheType.MLA) stays the enum's name for callers who print it)
    """How attention lays out its cache. With MLA every tensor-parallel rank holds the same bytes."""

    GQA = "GQA"
    MHA = "MHA"
    MLA = "MLA"
    MQA = "MQA"


@dataclass(slots=True)
class CcConfig_v1:
    """Identity of a rank. Attributes may be set after construction; `Ems.init` checks them by `validate`.

    rank_id, device_id >= 0; model_id 1..512 of [0-9a-z._-]; world sizes >= 1; 0 <= rank_in_X_group < X_world_size.
    """

    rank_id: int
    device_id: int
    model_id: str
    tp_world_size: int = 1
    pp_world_size: int = 1
    rank_in_tp_group: int = 0
    rank_in_pp_group: int = 0
    llm_engine: str = "vllm"
    kvcache_type: KVCacheType | str = KVCacheType.MHA

    def validate(self) -> None:
        """Raises EmsException(EMS_INVALID_ARGUMENT) naming the first attribute out of its range."""
        for name in ("rank_id", "device_id", "rank_in_tp_group", "rank_in_pp_group"):
            _check_int(name, getattr(self, name), 0)
        for name in ("tp_world_size", "pp_world_size"):
            _check_int(name, getattr(self, name), 1)
        for rank, size in (("rank_in_tp_group", "tp_world_size"), ("rank_in_pp_group", "pp_world_size")):
            if getattr(self, rank) >= getattr(self, size):
                raise invalid_argument(rank, f"must be below {size} ({getattr(self, size)}), got {getattr(self, rank)}")
        if not isinstance(self.model_id, str) or not _MODEL_ID.fullmatch(self.model_id):
            raise invalid_argument("model_id", "must be 1 to 512 characters of 0-9 a-z . - _")
        if not isinstance(self.llm_engine, str) or not 1 <= len(self.llm_engine) <= 512:
            raise invalid_argument("llm_engine", "must be a string of 1 to 512 characters")
        try:
            KVCacheType(self.kvcache_type)
        except ValueError:
            raise invalid_argument("kvcache_type", "must be one of GQA, MHA, MLA, MQA") from None


def _check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise invalid_argument(name, f"must be an integer of at least {minimum}, got {value!r}")
