"""What crosses between an ingress and a replica: a request and a hint there, items of a stream back (MessagePack)."""

from collections.abc import Iterable, Sequence

import msgspec

from kvloom.contract import errors
from kvloom.contract.errors import BadRequest, GenerationFailed, ServingError
from kvloom.contract.messages import RankInfo
from kvloom.contract.request import Delta, FinishReason, Request, TokenLogprob


class Hint(msgspec.Struct, array_like=True, frozen=True):
    """What the router reads of a request. `prefix`: knowledge.packed of its block hashes."""

    key: str
    num_tokens: int
    prefix: bytes = b""
    avoid: list[str] = []  # replicas that it was lost on
    layout: str = ""  # of the weights that began its answer; "" = any


class About(msgspec.Struct, array_like=True, frozen=True):
    """A replica: `layout` is equal where one can go on with the other's tokens."""

    replica: str
    layout: str
    version: str
    node: str
    pid: int
    max_seq_len: int
    info: RankInfo
    adapters: list[str] = []  # the digest of each that was loaded at the start, in order


class Hello(msgspec.Struct, array_like=True, tag="hello", frozen=True):
    """First of a stream: the request is accepted."""

    replica: str
    layout: str


class Piece(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """A Delta without its request's id."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    num_cached_tokens: int = 0
    seed: int | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    error: str | None = None
    is_callers: bool = False
    embedding: bytes | None = None


class Pieces(msgspec.Struct, array_like=True, tag="pieces", frozen=True):
    """What one or more steps have brought."""

    pieces: list[Piece]


class Fault(msgspec.Struct, array_like=True, tag="fault", frozen=True):
    """The request ended with an error: the name of a ServingError of contract.errors, the field if it has one."""

    kind: str
    text: str
    field: str = ""


Item = Hello | Pieces | Fault
_NAMES = [field.name for field in msgspec.structs.fields(Piece)]
_item_decoder = msgspec.msgpack.Decoder(Item)
_request_decoder = msgspec.msgpack.Decoder(Request)
_hint_decoder = msgspec.msgpack.Decoder(Hint)
_about_decoder = msgspec.msgpack.Decoder(About)
encode = msgspec.msgpack.Encoder().encode


def decode_item(data: bytes) -> Item:
    item: Item = _item_decoder.decode(data)
    return item


def decode_request(data: bytes) -> Request:
    return _request_decoder.decode(data)


def decode_hint(data: bytes) -> Hint:
    return _hint_decoder.decode(data)


def decode_about(data: bytes) -> About:
    return _about_decoder.decode(data)


def pieces(deltas: Iterable[Delta]) -> Pieces:
    return Pieces([Piece(*(getattr(delta, name) for name in _NAMES)) for delta in deltas])


def deltas(request_id: str, item: Pieces) -> Sequence[Delta]:
    return [Delta(request_id, **{name: getattr(piece, name) for name in _NAMES}) for piece in item.pieces]


def fault(error: ServingError) -> Fault:
    if isinstance(error, BadRequest):
        return Fault("BadRequest", error.problem, error.field)
    return Fault(type(error).__name__, str(error))


def error_of(item: Fault) -> ServingError:
    """The error as it was raised at the replica; one that is not of contract.errors is a GenerationFailed."""
    if item.kind == "BadRequest":
        return BadRequest(item.field, item.text)
    kind = getattr(errors, item.kind, None)
    if isinstance(kind, type) and issubclass(kind, ServingError):
        return kind(item.text)
    return GenerationFailed(item.text)
