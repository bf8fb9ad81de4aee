"""Valkey or Redis, alone or as a cluster, with TLS and ACL users as its client knows them (extra `valkey`)."""

from collections.abc import Sequence
from typing import Any

import valkey
import valkey.cluster

from kvloom.pool.stores.engine import EngineError, EngineFull

_ERRORS = (valkey.ValkeyError, valkey.exceptions.ValkeyClusterException, OSError)
_CLUSTER_ERRORS = (valkey.exceptions.ClusterError, valkey.exceptions.AskError, valkey.exceptions.TryAgainError)
_CONNECT_S = 2.0
_CALL_S = 10.0  # seconds of one socket operation, so that abandoned calls end


def connect(address: str, password: str) -> "ValkeyEngine":
    """A client of the server or cluster at a URL. Raises EngineError when it does not answer."""
    scheme, _, location = address.partition("://")
    kind: Any = valkey.Valkey
    if scheme.endswith("+cluster"):
        scheme, kind = scheme.removesuffix("+cluster"), valkey.cluster.ValkeyCluster
    options: dict[str, Any] = {"socket_timeout": _CALL_S}
    if scheme != "unix":
        options["socket_connect_timeout"] = _CONNECT_S
    if password:
        options["password"] = password
    try:
        client = kind.from_url(f"{scheme}://{location}", **options)
        client.ping()
    except (*_ERRORS, ValueError) as error:
        raise EngineError(f"engine {address}: {error}") from error
    return ValkeyEngine(client)


class ValkeyEngine:
    """Implements `Engine`. Pipelines, so that a cluster may hold each name elsewhere."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def put(self, names: Sequence[str], values: Sequence[bytes]) -> None:
        answers = self._run("set", [(name, value) for name, value in zip(names, values, strict=True)])
        if refusal := next(filter(_is_refusal, answers), None):
            raise EngineFull(str(refusal)) from refusal

    def get(self, names: Sequence[str]) -> list[memoryview | None]:
        answers = self._run("get", [(name,) for name in names])
        return [memoryview(answer) if isinstance(answer, bytes) else self._absent(answer) for answer in answers]

    @staticmethod
    def _absent(answer: Any) -> None:
        """None for no value, also where something else has the name. Raises EngineError for a refusal."""
        if answer is not None and not str(answer).startswith("WRONGTYPE"):
            raise EngineError(str(answer)) from answer

    def has(self, names: Sequence[str]) -> list[bool]:
        answers = self._run("exists", [(name,) for name in names])
        if refusal := next(filter(_is_refusal, answers), None):
            raise EngineError(str(refusal)) from refusal
        return [bool(answer) for answer in answers]

    def _run(self, command: str, arguments: list[tuple[str | bytes, ...]]) -> list[Any]:
        """An answer for each, which may be a refusal. Raises EngineError where the server, or one of them, is not
        reached.
        """
        try:
            pipeline = self._client.pipeline()
            if isinstance(self._client, valkey.Valkey):
                pipeline = self._client.pipeline(transaction=False)
            for each in arguments:
                getattr(pipeline, command)(*each)
            answers: list[Any] = pipeline.execute(raise_on_error=False)
        except _ERRORS as error:
            raise EngineError(str(error)) from error
        for answer in answers:
            if isinstance(answer, Exception) and not _is_refusal(answer):
                raise EngineError(str(answer)) from answer
        return answers

    def close(self) -> None:
        self._client.close()


def _is_refusal(answer: object) -> bool:
    """Whether a server answered that it will not; not that it is the wrong one, or that its cluster is down."""
    return isinstance(answer, valkey.ResponseError) and not isinstance(answer, _CLUSTER_ERRORS)
