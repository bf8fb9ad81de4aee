"""Messages between an ingress and a replica (MessagePack): a request and a hint there, items of a stream back.

The first deltas of a request come on its own stream, behind Hello. Later ones come as letters in the ingress's mailbox,
once it has one at the replica: one item there carries a step's deltas of all requests of the ingress.
"""

import msgspec

from kvloom.contract import errors
from kvloom.contract.errors import BadRequest, GenerationFailed, ServingError
from kvloom.contract.messages import RankInfo
from kvloom.contract.request import Delta, Request


class Hint(msgspec.Struct, array_like=True, frozen=True):
    """What the router reads of a request. `prefix`: knowledge.packed of its block hashes."""

    key: str
    num_tokens: int
    prefix: bytes = b""
    avoid: list[str] = []  # replicas that it was lost on
    layout: str = ""  # layout of the weights that began its answer; "" = any
    only: str = ""  # the replica to use; "" = the best one


class Asked(msgspec.Struct, array_like=True, frozen=True):
    """A request, and how to return its deltas: the ingress's mailbox ("" = none), and the request's key in letters."""

    request: Request
    box: str = ""
    key: int = 0


class Opening(msgspec.Struct, array_like=True, frozen=True):
    """Open a mailbox at this replica and no other."""

    box: str
    replica: str


class Letter(msgspec.Struct, array_like=True, frozen=True):
    """An item of a mailbox is a list of letters; each is a Brought for the request with this key."""

    key: int
    at: int
    deltas: list[Delta]


class About(msgspec.Struct, array_like=True, frozen=True):
    """Describes a replica: `layout` is equal where one can continue the other's answers."""

    replica: str
    layout: str
    version: str
    node: str
    pid: int
    max_seq_len: int
    info: RankInfo
    adapters: list[str] = []  # digest of each adapter loaded at the start, in order
    serves: str = ""  # identifies the files, see plan.served_as


class Hello(msgspec.Struct, array_like=True, tag="hello", frozen=True):
    """First item of a stream: the request is accepted."""

    replica: str
    layout: str
    serves: str = ""


class Brought(msgspec.Struct, array_like=True, tag="brought", frozen=True):
    """Deltas of one or more steps; `at` deltas came before."""

    at: int
    deltas: list[Delta]


class Ended(msgspec.Struct, array_like=True, tag="ended", frozen=True):
    """Last item of a stream: the request has ended after this many deltas, letters included."""

    num_deltas: int


class Fault(msgspec.Struct, array_like=True, tag="fault", frozen=True):
    """The request ended with an error: the name of a ServingError of contract.errors, and its field if it has one."""

    kind: str
    text: str
    field: str = ""


Item = Hello | Brought | Ended | Fault
_item_decoder = msgspec.msgpack.Decoder(Item)
_asked_decoder = msgspec.msgpack.Decoder(Asked)
_opening_decoder = msgspec.msgpack.Decoder(Opening)
_letters_decoder = msgspec.msgpack.Decoder(list[Letter])
_hint_decoder = msgspec.msgpack.Decoder(Hint)
_about_decoder = msgspec.msgpack.Decoder(About)
encode = msgspec.msgpack.Encoder().encode


def decode_item(data: bytes) -> Item:
    item: Item = _item_decoder.decode(data)
    return item


def decode_asked(data: bytes) -> Asked:
    return _asked_decoder.decode(data)


def decode_opening(data: bytes) -> Opening:
    return _opening_decoder.decode(data)


def decode_letters(data: bytes) -> list[Letter]:
    return _letters_decoder.decode(data)


def decode_hint(data: bytes) -> Hint:
    return _hint_decoder.decode(data)


def decode_about(data: bytes) -> About:
    return _about_decoder.decode(data)


def fault(error: ServingError) -> Fault:
    if isinstance(error, BadRequest):
        return Fault("BadRequest", error.problem, error.field)
    return Fault(type(error).__name__, str(error))


def error_of(item: Fault) -> ServingError:
    """The error as raised at the replica; one that is not in contract.errors becomes GenerationFailed."""
    if item.kind == "BadRequest":
        return BadRequest(item.field, item.text)
    kind = getattr(errors, item.kind, None)
    if isinstance(kind, type) and issubclass(kind, ServingError):
        return kind(item.text)
    return GenerationFailed(item.text)
