"""Fuzz inputs: random bytes, mutations of real traffic, and well-formed but false requests.

Every generator uses only the random numbers that it is given, so a failure can be repeated.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import get_args

import msgspec
from msgspec import inspect

from horovod_runner.common.slots import Offer
from horovod_runner.wire import framing
from horovod_runner.wire.messages import FromRank

# Boundary values of lengths and counts.
_SIZES = (0, 1, 7, 8, 127, 128, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32, 2**63, 2**64)
_NUMBERS = (0, 1, -1, 2, 3, 255, -128, 10**9, -(10**9), 2**31, 2**53, 2**63, 2**64 - 1, -(2**63))
_TEXTS = ("", "x", "0", "stdout", "stderr", "\0", "\n", "\r", "\x1b[2J", "é", "\U0001f4a9", "a" * 9)


def mutated(dice: random.Random, valid: bytes) -> bytes:
    """Valid traffic with a few bytes changed, removed, repeated or inserted."""
    data = bytearray(valid)
    for _ in range(dice.randint(1, 6)):
        at = dice.randrange(len(data) + 1)
        end = min(len(data), at + dice.choice((1, 1, 2, 4, 8, 64)))
        match dice.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << dice.randrange(8)
            case 1:
                data[at:end] = dice.randbytes(end - at)
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = data[at:end] * dice.choice((1, 2, 50))
            case 4:
                data[at:at] = dice.randbytes(dice.choice((1, 2, 8, 64)))
            case 5:
                data[at:end] = dice.choice((b"\xff", b"\0")) * (end - at)
            case 6:
                del data[at:]  # cut off
    return bytes(data)


def noise(dice: random.Random) -> bytes:
    """Random bytes, usually few."""
    return dice.randbytes(dice.choice((0, 1, 2, 9, 10, 11, 64, dice.randrange(300), 3000)))


# The protocol of the message channel: ZMTP 3.1 (rfc.zeromq.org/spec/37).

_MECHANISMS = (b"CURVE", b"NULL", b"PLAIN", b"GSSAPI", b"", b"CURVE\0X", b"\xff" * 20, b"A" * 20)
_COMMANDS = (b"HELLO", b"WELCOME", b"INITIATE", b"READY", b"ERROR", b"MESSAGE", b"PING", b"PONG")
# Protocols that port scanners try: HTTP, TLS, SSH, Redis, and two older versions of ZMTP.
_OTHER_PROTOCOLS = (
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(100)),
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"*1\r\n$4\r\nINFO\r\n",
    b"\x01\x00\x02\x00x",
    b"\xff\0\0\0\0\0\0\0\x01\x7f\x01\x05\x00\x00",
)


def _greeting(dice: random.Random) -> bytes:
    if dice.random() < 0.7:
        version, mechanism, server = b"\x03\x01", b"CURVE", 0
    else:
        version = bytes((dice.choice((0, 1, 2, 3, 4, 255)), dice.choice((0, 1, 2, 255))))
        mechanism, server = dice.choice(_MECHANISMS), dice.choice((0, 1, 2, 255))
    signature = b"\xff" + dice.choice((bytes(7) + b"\x01", dice.randbytes(8))) + b"\x7f"
    return signature + version + mechanism[:20].ljust(20, b"\0") + bytes([server]) + bytes(31)


def _zmtp_frame(dice: random.Random) -> bytes:
    name = dice.choice((*_COMMANDS, dice.randbytes(3)))
    body = bytes([dice.choice((len(name), len(name), 0, 255))]) + name
    # HELLO has 200 bytes, INITIATE at least 257: commands of the right length are parsed further.
    body += dice.randbytes(dice.choice((0, 3, 194, 248, 300, dice.randrange(600))))
    size = len(body) if dice.random() < 0.8 else dice.choice(_SIZES)
    flags = dice.choice((4, 4, 4, 0, 1, 2, 3, 6, 255))
    if flags & 2 or size > 255:
        return bytes([flags | 2]) + struct.pack(">Q", size % 2**64) + body
    return bytes([flags]) + struct.pack(">B", size) + body


def stranger(dice: random.Random, captured: Sequence[bytes]) -> bytes:
    """Bytes that a client without keys might send to the channel.

    Args:
        dice: the random numbers.
        captured: what real clients sent to this channel, one item per connection.
    """
    match dice.randrange(8):
        case 0:
            return noise(dice)
        case 1:
            return _greeting(dice) + noise(dice)
        case 2:
            return mutated(dice, dice.choice(_OTHER_PROTOCOLS))
        case 3:
            valid = dice.choice(captured)
            return valid[: dice.randrange(len(valid) + 1)]
        case 4 | 5:
            return mutated(dice, dice.choice(captured))
        case _:
            return _greeting(dice) + b"".join(_zmtp_frame(dice) for _ in range(dice.randint(1, 4)))


# The channel's messages, from a client that has the keys.


def _number(dice: random.Random) -> int:
    return dice.choice(_NUMBERS) if dice.random() < 0.5 else dice.randrange(4)


def _text(dice: random.Random) -> str:
    return dice.choice(_TEXTS)


def _anything(dice: random.Random, depth: int = 0) -> object:
    """Any value that MessagePack can encode."""
    kinds: list[Callable[[], object]] = [
        lambda: _number(dice),
        lambda: _text(dice),
        lambda: dice.choice((None, True, False, 0.5, -1e300, float("nan"), float("inf"))),
        lambda: dice.randbytes(dice.randrange(20)),
        lambda: _valid(dice, inspect.type_info(Offer)),
        lambda: [_anything(dice, depth + 1) for _ in range(dice.randrange(5))],
        lambda: {_text(dice): _anything(dice, depth + 1) for _ in range(dice.randrange(4))},
    ]
    return dice.choice(kinds if depth < 4 else kinds[:5])()


_FILES = (
    "checkpoint-000001-step-1-0a1b2c3d.pt",
    "checkpoint-000001-step-1-0a1b2c3d.json",
    "timeline",
    "torch.json.gz",
    "../x",
    "/etc/passwd",
    "checkpoint-000001-step-1-../../x.pt",
)


def _valid(dice: random.Random, kind: inspect.Type, name: str = "") -> object:
    """A value that a type allows.

    Args:
        dice: the random numbers.
        kind: the type.
        name: of the field that has it.
    """
    value: object = None
    match kind:
        case inspect.StrType():
            texts = {"run_id": ("0a1b2c3d",), "name": _FILES}
            value = dice.choice(texts.get(name, _TEXTS))
        case inspect.IntType():
            value = _number(dice)
        case inspect.FloatType():
            value = dice.choice((0.5, -1e300, float("nan"), dice.random() * 1e10))
        case inspect.BoolType():
            value = dice.random() < 0.5
        case inspect.BytesType():
            value = dice.randbytes(dice.choice((8, dice.randrange(3000))))
        case inspect.LiteralType(values):
            value = dice.choice((*values, "exe"))
        case inspect.UnionType(types):
            value = _valid(dice, dice.choice(types))
        case inspect.ListType(item) | inspect.VarTupleType(item):
            value = [_valid(dice, item) for _ in range(dice.choice((0, 1, 2, 3, 30)))]
        case inspect.TupleType(items):
            value = [_valid(dice, item) for item in items]
        case inspect.DictType(_, item):
            value = {_text(dice): _valid(dice, item) for _ in range(3)}
        case inspect.StructType(fields=fields):
            given = [each for each in fields if each.required or dice.random() < 0.3]
            value = {each.encode_name: _valid(dice, each.type, each.name) for each in given}
    return value


# The fields of each message that a rank may send, by its name.
_FIELDS = {
    str(kind.tag): kind.fields
    for kind in inspect.multi_type_info(get_args(FromRank))
    if isinstance(kind, inspect.StructType)
}
_NAMES = (*_FIELDS, "Welcome", "Assignment", "Stop", "Taken", "Message", "")


def message(dice: random.Random, excluded: Collection[str] = ()) -> bytes:
    """One message, usually of the right types but with random values.

    Args:
        dice: the random numbers.
        excluded: the types of messages to leave out.
    """
    name = dice.choice([name for name in _FIELDS if name not in excluded])
    values = [_valid(dice, field.type, field.name) for field in _FIELDS[name]]
    match dice.randrange(8):
        case 0:  # one field of a wrong type
            values[dice.randrange(len(values))] = _anything(dice)
        case 1:  # too few, or too many
            values = dice.choice((values[:-1], values + [_anything(dice)] * 3))
        case 2:
            name = dice.choice([name for name in _NAMES if name not in excluded])
        case 3:
            return msgspec.msgpack.encode(_anything(dice))
        case _:
            pass
    return msgspec.msgpack.encode([name, *values])


def _nested(dice: random.Random) -> bytes:
    """A message with an extra field of deeply nested containers."""
    level = dice.choice((b"\x91", b"\x81\xa0"))  # a list of one, a map of one
    return b"\x94\xa3Log\x00\xa1x" + level * dice.choice((10, 1000, 20_000)) + b"\xc0"


def batch(dice: random.Random) -> bytes:
    """A batch that a hostile client with the keys might send."""
    whole = b"".join(framing.frame(message(dice)) for _ in range(dice.choice((1, 1, 1, 2, 5))))
    match dice.randrange(12):
        case 0:
            return noise(dice)
        case 1 | 2:
            return mutated(dice, whole)
        case 3:
            return framing.LENGTH.pack(dice.choice(_SIZES) % 2**32) + whole
        case 4 if dice.random() < 0.1:
            return framing.frame(_nested(dice))
        case _:
            return whole


def routing_id(dice: random.Random, size: int) -> bytes:
    """The name of a connection that belongs to no task of a run with ``size`` ranks."""
    task = dice.randrange(size)
    near = (" N", "N ", "0N", "+N", "-1N", "N_0", "N.0", "N\0", "1N", "N" * 255, "٣N")
    if dice.random() < 0.5:
        return dice.choice(near).replace("N", str(task)).encode()
    return b"r" + dice.randbytes(dice.randrange(1, 255))


# HTTP requests to the rendezvous server.

_METHODS = ("GET", "PUT", "DELETE", "POST", "HEAD", "OPTIONS", "get", "", "G\0T", "GET GET", "PRI")
_SCOPES = ("global", "local_h-0af3", "cross_3", "global_process_set_hash_1f", "..", "", "local_é")
_KEYS = ("0", "1", "rank_0", "99", "-1", "x", "", "0" * 300, "²", "1/2", "%30")
_HEADERS = (
    "Content-Length: {}",
    "content-length:{}",
    "Content-Length:  +{}",
    "Transfer-Encoding: chunked",
    "Connection: keep-alive",
    "Expect: 100-continue",
    "Upgrade: websocket",
    "X: {}",
    ": {}",
    "\0",
    " folded",
)


def lying_request(dice: random.Random, token: str, port: int) -> bytes:
    """A request with one or two wrong parts, usually otherwise correct."""
    method = dice.choice(_METHODS if dice.random() < 0.2 else _METHODS[:3])
    scope = dice.choice(_SCOPES if dice.random() < 0.2 else _SCOPES[:4])
    key = dice.choice(_KEYS if dice.random() < 0.2 else _KEYS[:3])
    path = f"/{token}:{port}/{scope}/{key}"
    if dice.random() < 0.1:
        path = dice.choice((f"//{path}", f"http://x{path}", f"/{scope}/{key}", "*", "/" * 99))
    version = dice.choice((" HTTP/1.1", " HTTP/1.1", " HTTP/1.0", " HTTP/9.9", "", " "))
    count = 900 if dice.random() < 0.01 else dice.choice((0, 1, 1, 2, 3, 20))
    values = (*_SIZES, *_TEXTS)
    headers = [dice.choice(_HEADERS).format(dice.choice(values)) for _ in range(count)]
    end = "\r\n" if dice.random() < 0.8 else dice.choice(("\n", "\r", ""))
    text = end.join((f"{method} {path}{version}", *headers, end))
    return text.encode("utf-8", "replace") + noise(dice)


def token(dice: random.Random, right: str) -> str:
    """A wrong token, sometimes similar to the right one."""
    near = (right[:-1], right + "x", right.swapcase(), right[::-1], "é" * 32, "", "²" * 32, "-")
    return dice.choice((*near, "guess", "x" * len(right)))


def request(dice: random.Random, captured: Sequence[bytes], right: str, port: int) -> bytes:
    """Bytes that a client without the token might send to the rendezvous server.

    Args:
        dice: the random numbers.
        captured: what Horovod sent to such a server, one item per connection.
        right: the right token, which the result must not contain.
        port: the server's.
    """
    wrong = token(dice, right)
    match dice.randrange(8):
        case 0:
            return noise(dice)
        case 1:
            return noise(dice) + b"\r\n\r\n" + noise(dice)
        case 2:
            valid = dice.choice(captured)
            return valid[: dice.randrange(len(valid) + 1)]
        case 3 | 4:
            return mutated(dice, dice.choice(captured))
        case 5:  # several requests on one connection
            return b"".join(lying_request(dice, wrong, port) for _ in range(dice.randint(2, 5)))
        case _:
            return lying_request(dice, wrong, port)


def repeat(seed: int, count: int, make: Callable[[random.Random], bytes]) -> Iterator[bytes]:
    """``count`` inputs, the same for the same seed."""
    dice = random.Random(seed)
    for _ in range(count):
        yield make(dice)
