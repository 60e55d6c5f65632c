"""Messages between the processes of one appliance: typed, bounded, and never pickled.

A message is one frozen dataclass. On the wire it is a frame: a 4-byte big-endian length, then one JSON object whose
member ``kind`` names the class. Frames travel over socket pairs that a child inherits from the agent, so there is no
name to guess and no port to connect to. The bundle key never travels here; see provisioning/grant.py.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import struct
import typing
from dataclasses import dataclass, field

from appliance.errors import ProtocolError

MAX_FRAME = 64 << 20
LENGTH = struct.Struct(">I")


class Message:
    """Base of all messages."""

    __slots__ = ()


# --- agent -> rank -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Load(Message):
    """Load the sealed bundle; the key follows on the key descriptor.

    Attributes:
        bundle: directory of the sealed bundle.
        manifest_digest: SHA-384 of the manifest that the grant is for, 48 bytes; the rank reads the bundle itself and
            refuses any other.
        owner_key: the pinned owner key file.
        device: ``cpu`` or ``cuda:N``.
        rank, world: which part of the model this process holds.
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto`` (float32 on the CPU, the file's own on a GPU).
        reader_threads, opener_threads: threads of the pipeline; 0 lets the rank choose.
        ring_bytes: host staging memory, the bound on plaintext outside the device; 0 lets the rank choose.
        open_on: who decrypts weights, ``host`` or ``device``.
        kv_cache_bytes: memory for the KV cache.
        max_context: longest prompt plus answer, tokens.
        max_concurrent: requests decoded together.
        compute_threads: CPU threads for arithmetic; 0 lets torch choose.
    """

    bundle: str
    manifest_digest: bytes
    owner_key: bytes
    device: str
    rank: int
    world: int
    dtype: str
    reader_threads: int
    opener_threads: int
    ring_bytes: int
    open_on: str
    kv_cache_bytes: int
    max_context: int
    max_concurrent: int
    compute_threads: int


@dataclass(frozen=True, slots=True)
class Zeroize(Message):
    """Stop, overwrite everything, read it back, answer with :class:`Wiped`."""


@dataclass(frozen=True, slots=True)
class Exit(Message):
    """Leave now. Sent after :class:`Wiped`."""


# --- rank -> agent -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress(Message):
    """Bytes of ciphertext opened so far, of the bytes that this rank must open.

    Attributes:
        opened_bytes: so far.
        total_bytes: in all.
        plaintext_bytes: plaintext in host memory on its way to the device, now.
        peak_plaintext_bytes: most of it at once.
    """

    opened_bytes: int
    total_bytes: int
    plaintext_bytes: int
    peak_plaintext_bytes: int


@dataclass(frozen=True, slots=True)
class Resident(Message):
    """Every segment of this rank was opened exactly once and lies in device memory; the key is wiped."""

    device: str
    weight_bytes: int
    segments: int
    seconds: float
    ring_bytes: int
    peak_plaintext_bytes: int
    peak_rss_bytes: int


@dataclass(frozen=True, slots=True)
class RankFailed(Message):
    """The rank refuses to go on; fields as in attestation.errors.LetheError."""

    code: str
    found: str
    expected: str
    hint: str
    exit_status: int


@dataclass(frozen=True, slots=True)
class Wiped(Message):
    """What was overwritten, and what reading it back showed.

    Attributes:
        overwritten_bytes: device memory filled with zeros (weights, KV cache, buffers).
        read_back_bytes: device memory read again after the fill.
        nonzero_bytes: bytes that were not zero on reading back; anything but 0 means exit status 9.
        staging_bytes: host ring overwritten and read back.
        seconds: time taken.
    """

    device: str
    overwritten_bytes: int
    read_back_bytes: int
    nonzero_bytes: int
    staging_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RankStats(Message):
    """Counters of the engine, sent about once a second while serving. Numbers only."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    prompt_tokens: int
    generated_tokens: int


# --- engine -> api -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelReady(Message):
    """What the API needs of the sealed catalog; it stays in memory there and touches no file.

    Attributes:
        max_context: longest prompt plus answer, tokens.
        vocabulary: number of token ids; ids at or above it are refused.
        eos_ids: ids that end an answer.
        tokenizer: ``tokenizer.json``.
        tokenizer_config: ``tokenizer_config.json``.
        chat_template: ``chat_template.jinja``, or empty when the template is in ``tokenizer_config``.
    """

    max_context: int
    vocabulary: int
    eos_ids: list[int]
    tokenizer: bytes
    tokenizer_config: bytes
    chat_template: bytes


@dataclass(frozen=True, slots=True)
class Tokens(Message):
    """New tokens of one request.

    Attributes:
        finish: empty while it runs; ``stop``, ``length`` or ``cancelled`` in the last message of a request.
    """

    request: str
    tokens: list[int] = field(repr=False)
    finish: str


@dataclass(frozen=True, slots=True)
class Rejected(Message):
    """The engine refuses one request; others go on."""

    request: str
    code: str
    message: str


# --- api -> engine -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit(Message):
    """Generate from a prompt.

    Attributes:
        request: id chosen by the API, unique while the request lives.
        prompt: token ids.
        max_tokens: at least 1.
        temperature: 0 is greedy.
        top_p: 0 < top_p <= 1.
        top_k: 0 means no limit.
        seed: -1 means a random one.
        stop_ids: token ids that end the answer (the model's own end tokens, unless ignored).
    """

    request: str
    prompt: list[int] = field(repr=False)
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    seed: int
    stop_ids: list[int]


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Forget a request: its blocks are overwritten and returned. Unknown ids are ignored."""

    request: str


# --- agent <-> api -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ApiSettings(Message):
    """First message to the API process.

    Attributes:
        host, port: where to listen; port 0 takes a free one.
        tls: serve HTTPS with a key made in this process's memory.
        keys_file: file of client keys as salted hashes.
        model: the name clients use.
        platform_banner: ``SIMULATED`` for laboratory evidence, else empty; sent as a header of every response.
        max_body_bytes: largest request body.
        max_output_tokens: cap on one answer by the owner's serving policy.
        max_queue: requests admitted at once; more get 429.
        request_seconds: longest time for one request.
    """

    host: str
    port: int
    tls: bool
    keys_file: str
    model: str
    platform_banner: str
    max_body_bytes: int
    max_output_tokens: int
    max_queue: int
    request_seconds: int


@dataclass(frozen=True, slots=True)
class ApiListening(Message):
    """The API listens and answers 503 until told to serve.

    Attributes:
        tls_key_sha384: SHA-384 of the TLS public key (SubjectPublicKeyInfo DER), or 48 zero bytes without TLS.
        certificate: the self-signed certificate, PEM.
    """

    port: int
    tls_key_sha384: bytes
    certificate: bytes


@dataclass(frozen=True, slots=True)
class Admit(Message):
    """Open or close admission. Closed, new requests get 503 and running ones are ended."""

    open: bool


@dataclass(frozen=True, slots=True)
class Drain(Message):
    """Refuse new requests with 503 and let the running ones finish; ApiStats.active says how many are left."""


@dataclass(frozen=True, slots=True)
class ApiStats(Message):
    """State and counters of the API, sent about once a second and when the state changes. Numbers only.

    Attributes:
        serving: new requests are admitted: the agent said so and the tokenizer is ready.
        active: answers under way.
        served, refused: requests answered in full, and with an error.
    """

    serving: bool
    active: int
    served: int
    refused: int


_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__subclasses__()}


def refuse_message(found: str, expected: str) -> typing.NoReturn:
    """Raise ``protocol.message``."""
    raise ProtocolError(
        "protocol.message",
        found=found,
        expected=expected,
        hint="the processes of one appliance must be of one version; restart the agent",
    )


def misdirected(message: Message, *, expected: str) -> ProtocolError:
    """Give the refusal of a message that the other process must not send, or not now: ``protocol.direction``."""
    return ProtocolError(
        "protocol.direction",
        found=type(message).__name__,
        expected=expected,
        hint="the processes of one appliance must be of one version; restart the agent",
    )


_CHECKS: dict[typing.Any, typing.Callable[[typing.Any], bool]] = {
    int: lambda value: type(value) is int,
    float: lambda value: type(value) in (int, float),
    str: lambda value: type(value) is str,
    bool: lambda value: type(value) is bool,
    bytes: lambda value: type(value) is str,
    list[int]: lambda value: type(value) is list and all(type(item) is int for item in value),
}


def encode(message: Message) -> bytes:
    """Give the frame of a message."""
    members: dict[str, typing.Any] = {"kind": type(message).__name__}
    for member in dataclasses.fields(message):  # type: ignore[arg-type]  # every subclass is a dataclass
        value = getattr(message, member.name)
        members[member.name] = base64.b64encode(value).decode() if isinstance(value, bytes) else value
    body = json.dumps(members, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_FRAME:
        refuse_message(f"a message of {len(body)} bytes", f"at most {MAX_FRAME}")
    return LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Read the body of a frame.

    Raises:
        ProtocolError: ``protocol.message`` for anything but exactly one of the messages above.
    """
    try:
        members = json.loads(body)
        kind = _KINDS[members.pop("kind")]
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        refuse_message("an unknown message", "one of the messages of this version")
    hints = typing.get_type_hints(kind)
    if members.keys() != hints.keys():
        refuse_message(f"{kind.__name__} with {sorted(members)}", f"{sorted(hints)}")
    for name, hint in hints.items():
        if not _CHECKS[hint](members[name]):
            refuse_message(f"{kind.__name__}.{name} of the wrong type", str(hint))
        if hint is bytes:
            try:
                members[name] = base64.b64decode(members[name], validate=True)
            except (binascii.Error, ValueError):
                refuse_message(f"{kind.__name__}.{name}", "base64")
        elif hint is float:
            members[name] = float(members[name])
    return kind(**members)
