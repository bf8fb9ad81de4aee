"""Settings of a plug-in from its engine's configuration, checked once; and the sessions opened with them."""

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from ems.cc_v1.cc_config import CcConfig_v1, KVCacheType
from ems.common.exception import EmsException
from ems.config import EmsConfig
from ems.session import Session, locate_socket
from ems.values.pool import KvPool

log = logging.getLogger(__name__)
_TEXTS = ("socket", "access_id", "access_key_file", "model_id")
KEYS = (*_TEXTS, "timeout_ms")
CONNECTOR_KEYS = (*KEYS, "handover_ms", "layerwise")
_MAX_TIMEOUT_MS = 60_000
_CONNECTOR = "kv_connector_extra_config"
_PIECE_BYTES = 4 << 20
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf", ".json")


@dataclass(frozen=True, slots=True)
class Settings:
    """socket: path of the agent's, empty = the default paths; model_id: empty = made from the model's files.
    timeout_ms: how long a request waits for its prefix, and a save for the pool. handover_ms: how long a request
    waits for tokens that another engine has promised (EMSConnector only). layerwise: blocks are copied to and from
    the engine's cache one layer at a time (EMSConnector only).
    """

    socket: str = ""
    access_id: str = ""
    access_key: str = ""
    model_id: str = ""
    timeout_ms: int = 500
    handover_ms: int = 2000
    layerwise: bool = False

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str = _CONNECTOR) -> "Settings":
        """where: the part of the engine's configuration, for errors. Raises ValueError that names an unknown or wrong
        key.
        """
        known = CONNECTOR_KEYS if where == _CONNECTOR else KEYS
        unknown = sorted(values.keys() - set(known))
        if unknown:
            raise ValueError(f"{where}.{unknown[0]}: is not known; known are {', '.join(known)}")
        for name in _TEXTS:
            if not isinstance(values.get(name, ""), str):
                raise ValueError(f"{where}.{name}: must be a string")
        if not isinstance(values.get("layerwise", False), bool):
            raise ValueError(f"{where}.layerwise: must be true or false")
        settings = cls(
            values.get("socket", ""),
            values.get("access_id", ""),
            _first_line(values.get("access_key_file", ""), where),
            values.get("model_id", ""),
            _number(values, "timeout_ms", 500, where),
            _number(values, "handover_ms", 2000, where),
            values.get("layerwise", False),
        )
        try:
            settings._config(CcConfig_v1(0, 0, settings.model_id or "m")).validate()
        except EmsException as error:
            raise ValueError(f"{where}.{error.message()}") from None
        return settings

    def _config(self, identity: CcConfig_v1) -> EmsConfig:
        return EmsConfig(self.access_id or None, self.access_key or None, identity)

    def open(self, identity: CcConfig_v1) -> Session:
        """A session of one rank. It connects when it is first used."""
        config = self._config(identity)
        config.validate()
        return Session(config, self._locate)

    def open_pool(self, identity: CcConfig_v1, layout: str) -> KvPool:
        """Values in one layout of one rank. It connects when it is first used."""
        return KvPool(self._config(identity), layout, self._locate)

    def _locate(self, deadline_s: float) -> Path:
        return Path(self.socket) if self.socket else locate_socket(deadline_s)


@dataclass(frozen=True, slots=True)
class KindLayout:
    """The blocks of one kind of attention. arrangement: the engine's order of elements in a block. widths: for each
    group of layers, the bytes of one block in each registered part.
    """

    arrangement: str
    widths: tuple[tuple[int, ...], ...]

    @property
    def block_bytes(self) -> int:
        return sum(map(sum, self.widths))

    def empty_cache(self) -> list[list[npt.NDArray[np.uint8]]]:
        """A cache of one block that is never filled: enough to compute the names of blocks."""
        return [[np.empty((1, 1, width), np.uint8) for width in group] for group in self.widths]


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Sent by a worker to the scheduler, so that both use the same names for a rank's blocks."""

    model_id: str
    engine: str
    is_mla: bool
    tp_world_size: int
    pp_world_size: int
    rank_in_tp: int
    rank_in_pp: int
    kinds: tuple[KindLayout, ...]

    def identity(self, kind: int) -> CcConfig_v1:
        """The identity in names of blocks of one kind."""
        arrangement = self.kinds[kind].arrangement
        return CcConfig_v1(
            rank_id=self.rank_in_pp * self.tp_world_size + self.rank_in_tp,
            device_id=0,
            model_id=self.model_id,
            tp_world_size=self.tp_world_size,
            pp_world_size=self.pp_world_size,
            rank_in_tp_group=self.rank_in_tp,
            rank_in_pp_group=self.rank_in_pp,
            llm_engine=f"{self.engine}/{hashlib.sha256(arrangement.encode()).hexdigest()[:32]}",
            kvcache_type=KVCacheType.MLA if self.is_mla else KVCacheType.GQA,
        )

    def open(self, settings: Settings, kind: int, kvcache: Sequence[Sequence[object]]) -> Session:
        """A session over blocks of one kind; kvcache: of each group of layers, its registered parts."""
        session = settings.open(self.identity(kind))
        groups = [[number] for number in range(len(kvcache))] if len(kvcache) > 1 else None
        session.caching.register_kvcache([list(parts) for parts in kvcache], groups)
        return session


def model_fingerprint(folder: str, facts: tuple[object, ...]) -> str:
    """A model_id from the engine's configuration (`facts`) and, for a local folder, every byte of its weights.

    So copies on several nodes share blocks, and no other model does. Takes as long as reading the weights from disk;
    setting model_id avoids that.
    """
    digest = hashlib.sha256(repr(facts).encode())
    if os.path.isdir(folder):
        for path in sorted(Path(folder).iterdir()):
            if path.suffix in _WEIGHTS:
                digest.update(f"{path.name}|{path.stat().st_size}|{_hash_of(path)}|".encode())
    else:
        digest.update(folder.encode())
    return f"m-{digest.hexdigest()}"


def _hash_of(path: Path) -> str:
    hashed = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            hashed.update(piece)
    return hashed.hexdigest()


def _number(values: Mapping[str, Any], name: str, default: int, where: str) -> int:
    """A number of milliseconds."""
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_TIMEOUT_MS:
        raise ValueError(f"{where}.{name}: must be 1 to {_MAX_TIMEOUT_MS}")
    return value


def _first_line(path: str, where: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
    except OSError as error:
        raise ValueError(f"{where}.access_key_file: {path}: {error.strerror}") from None
