"""What crosses between an ingress and a replica (MessagePack): a request and a hint there, items of a stream back.

The first deltas of a request come on its own stream, behind Hello; the others as letters in the ingress's mailbox, once
it has one at the replica: what a step brings to all requests of an ingress is one item there.
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
    layout: str = ""  # of the weights that began its answer; "" = any
    only: str = ""  # the replica that is meant; "" = whichever is best


class Asked(msgspec.Struct, array_like=True, frozen=True):
    """A request, and how to tell of it: the ingress's mailbox ("" = it has none), and its name in letters."""

    request: Request
    box: str = ""
    key: int = 0


class Opening(msgspec.Struct, array_like=True, frozen=True):
    """A mailbox is to be filled at this replica and no other."""

    box: str
    replica: str


class Letter(msgspec.Struct, array_like=True, frozen=True):
    """An item of a mailbox is a list of them. Each is as Brought, for the request that was asked with this key."""

    key: int
    at: int
    deltas: list[Delta]


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
    serves: str = ""  # which files, see plan.served_as


class Hello(msgspec.Struct, array_like=True, tag="hello", frozen=True):
    """First of a stream: the request is accepted."""

    replica: str
    layout: str
    serves: str = ""


class Brought(msgspec.Struct, array_like=True, tag="brought", frozen=True):
    """What one or more steps have brought; `at` deltas came before."""

    at: int
    deltas: list[Delta]


class Ended(msgspec.Struct, array_like=True, tag="ended", frozen=True):
    """Last of a stream: the request has ended, and so many deltas are all of it, those of the mailbox among them."""

    num_deltas: int


class Fault(msgspec.Struct, array_like=True, tag="fault", frozen=True):
    """The request ended with an error: the name of a ServingError of contract.errors, the field if it has one."""

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
    """The error as it was raised at the replica; one that is not of contract.errors is a GenerationFailed."""
    if item.kind == "BadRequest":
        return BadRequest(item.field, item.text)
    kind = getattr(errors, item.kind, None)
    if isinstance(kind, type) and issubclass(kind, ServingError):
        return kind(item.text)
    return GenerationFailed(item.text)
