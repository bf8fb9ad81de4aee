"""CcConfig_v1: who this process is within its model instance (spec ems table 6-2)."""

import re
from dataclasses import dataclass
from enum import Enum

from ems.common.exception import invalid_argument
from ems.common.text import is_text
from ems.keys import Identity

LEGACY_ID = "cc_kvstore@_@ds_default_ns_001"
"""What deployed adapters ship with, as access_id (then it is the default tenant) and as model_id."""

_MODEL_ID = re.compile(r"[0-9a-z._-]{1,512}")


class KVCacheType(str, Enum):
    """How attention lays out its cache. With MLA every tensor-parallel rank holds the same bytes."""

    GQA = "GQA"
    MHA = "MHA"
    MLA = "MLA"
    MQA = "MQA"


@dataclass(slots=True)
class CcConfig_v1:
    """Identity of a rank. Attributes may be set after construction; `Ems.init` checks them by `validate`.

    rank_id, device_id >= 0; model_id 1..512 of [0-9a-z._-], or the one that adapters ship with; world sizes >= 1;
    0 <= rank_in_X_group < the instance's ranks, which are tp_world_size * pp_world_size.
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
        num_ranks = self.tp_world_size * self.pp_world_size
        for rank in ("rank_in_tp_group", "rank_in_pp_group"):
            if getattr(self, rank) >= num_ranks:
                text = f"must be below tp_world_size * pp_world_size ({num_ranks}), got {getattr(self, rank)}"
                raise invalid_argument(rank, text)
        is_named = isinstance(self.model_id, str) and (self.model_id == LEGACY_ID or _MODEL_ID.fullmatch(self.model_id))
        if not is_named:
            raise invalid_argument("model_id", "must be 1 to 512 characters of 0-9 a-z . - _")
        if not is_text(self.llm_engine) or not 1 <= len(self.llm_engine) <= 512:
            raise invalid_argument("llm_engine", "must be a string of 1 to 512 characters that UTF-8 can carry")
        try:
            KVCacheType(self.kvcache_type)
        except ValueError:
            raise invalid_argument("kvcache_type", "must be one of GQA, MHA, MLA, MQA") from None

    def identity(self) -> Identity:
        """What of it goes into names; valid values are assumed."""
        kind = KVCacheType(self.kvcache_type)
        return Identity(
            self.model_id,
            self.llm_engine,
            kind.value,
            self.tp_world_size,
            self.pp_world_size,
            None if kind is KVCacheType.MLA else self.rank_in_tp_group,
            self.rank_in_pp_group,
        )


def _check_int(name: str, value: object, minimum: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise invalid_argument(name, f"must be an integer of at least {minimum}, got {value!r}")
