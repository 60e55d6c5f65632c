"""Vectors of manifests: forged, by the wrong key, or signed by an owner whose packer was faulty or hostile."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from attestation import strictjson
from attestation.strictjson import b64
from tests.vectors.good import GOOD, parts
from tests.vectors.sealed import (
    LAB,
    PRODUCTION,
    SEGMENT,
    STRANGER,
    Owner,
    Vector,
    VectorSet,
    committed,
    manifest_of,
    signed,
)

_MOST = 2**63 - 1

# what is wrong, members that are changed, code
_MEMBERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "type": ("a challenge in a manifest's envelope", {"type": "challenge"}, "object.type"),
    "version": ("a newer version", {"version": 2}, "object.version"),
    "suite": ("another cipher suite", {"suite": "AES-128-GCM/HKDF-SHA256"}, "manifest.suite"),
    "name": ("a name of spaces", {"name": "  "}, "manifest.name"),
    "name-nul": ("a name with a zero byte", {"name": "a\0b"}, "json.text"),
    "owner-form": ("an owner that is no key id", {"owner": "Z" * 96}, "manifest.owner"),
    "owner-other": ("an owner who did not sign it", {"owner": PRODUCTION.keys.public.key_id}, "manifest.owner"),
    "purpose": ("production, signed by a lab key", {"purpose": "production"}, "manifest.purpose"),
    "purpose-unknown": ("an unknown purpose", {"purpose": "test"}, "owner.purpose.unknown"),
    "epoch": ("another epoch than the policy's", {"epoch": 8}, "manifest.epoch"),
    "policy": ("a policy without its rules", {"policy": {"version": 1}}, "manifest.policy"),
    "member": ("a member that no version has", {"layers": 30}, "json.unknown"),
    "bundle-id": ("a bundle id of 15 bytes", {"bundle_id": b64(bytes(15))}, "json.base64"),
    "segment-odd": ("segments of no power of two", {"segment_size": 3 << 18}, "manifest.geometry"),
    "segment-small": ("segments below 256 KiB", {"segment_size": 1 << 17}, "manifest.geometry"),
    "segment-huge": ("segments at the edge of 63 bits", {"segment_size": _MOST}, "json.range"),
    "section-part": ("sections of no whole segments", {"section_bytes": 2 * SEGMENT + 1}, "manifest.geometry"),
    "file-huge": ("files at the edge of 63 bits", {"file_bytes": _MOST}, "json.range"),
    "streams-none": ("no streams", {"streams": []}, "manifest.geometry"),
    "streams-three": ("three columns", {"streams": [1, 2, 1, 1, 1]}, "manifest.geometry"),
    "streams-many": ("128 columns", {"streams": [1] * 130}, "json.range"),
    "streams-huge": ("a stream at the edge of 63 bits", {"streams": [1, _MOST, 1, 1]}, "manifest.geometry"),
    "streams-total": ("one segment more than a bundle has", {"streams": [1, 1 << 22, 0, 0]}, "manifest.geometry"),
    "streams-below": ("a count below zero", {"streams": [1, -1, 1, 1]}, "manifest.geometry"),
    "streams-true": ("a count that is true", {"streams": [1, True, 1, 1]}, "manifest.geometry"),
    "catalog-none": ("no catalog", {"streams": [0, 2, 1, 1]}, "manifest.geometry"),
    "catalog-huge": ("a catalog of 400 MiB", {"streams": [1600, 2, 1, 1]}, "manifest.geometry"),
    "files-many": (
        "more files than a bundle has",
        {"streams": [1, 1 << 17, 1, 1], "file_bytes": SEGMENT},
        "manifest.geometry",
    ),
}

_SOUND_NAME = b'"name":"vectors"'
# what is wrong, how the payload's text is changed, code
_TEXTS: dict[str, tuple[str, tuple[bytes, bytes], str]] = {
    "spaces": ("a space that no writer writes", (b',"epoch"', b', "epoch"'), "manifest.form"),
    "escape": ("a letter written as an escape", (b'"type"', b'"\\u0074ype"'), "manifest.form"),
    "twice": ("a member twice", (_SOUND_NAME, _SOUND_NAME + b"," + _SOUND_NAME), "json.duplicate"),
    "float": ("a fraction", (b'"epoch":7', b'"epoch":7.0'), "json.float"),
    "integer": ("a number of 65 bits", (b'"epoch":7', b'"epoch":18446744073709551616'), "json.integer"),
    "minus-zero": ("a zero with a sign", (b'"epoch":7', b'"epoch":-0'), "json.integer"),
    "depth": ("seventeen levels", (_SOUND_NAME, b'"name":' + b"[" * 16 + b"]" * 16), "json.depth"),
    "surrogate": ("half of a surrogate pair", (b"vectors", b"\\ud800"), "json.utf8"),
    "utf8": ("a byte that is no UTF-8", (b"vectors", b"\xff"), "json.utf8"),
    "cut": ("text that ends early", (b"}", b""), "json.syntax"),
}


def _drop(entry: int) -> Any:
    def change(envelope: dict[str, Any]) -> None:
        del envelope["signatures"][entry]

    return change


def _flip(envelope: dict[str, Any]) -> None:
    # Another payload under the same signatures.
    payload = envelope["payload"]
    envelope["payload"] = payload[:40] + ("A" if payload[40] != "A" else "B") + payload[41:]


def _retype(envelope: dict[str, Any]) -> None:
    envelope["payloadType"] = "application/vnd.lethe.challenge+json"


_ENVELOPES: dict[str, tuple[str, Any, str]] = {
    "payload": ("one character of the payload", _flip, "signature.wrong"),
    "half": ("the post-quantum half of the signature is missing", _drop(0), "signature.half"),
    "kind": ("the envelope says it is a challenge", _retype, "envelope.type"),
}


def add(made: VectorSet, kept: Path) -> None:
    """Add these vectors."""
    sound = manifest_of(GOOD.geometry, parts().table)
    for fault, (about, members, code) in _MEMBERS.items():
        _add(made, kept, fault, strictjson.dumps({**sound, **members}), about=about, opened=code)
    without = {name: value for name, value in sound.items() if name != "key_commitment"}
    _add(made, kept, "missing", strictjson.dumps(without), about="no key commitment", opened="json.missing")
    for fault, (about, (old, new), code) in _TEXTS.items():
        text = strictjson.dumps(sound)
        payload = new.join(text.rsplit(old, 1)) if fault == "cut" else text.replace(old, new, 1)
        _add(made, kept, fault, payload, about=about, opened=code)
    key = {**sound, "key_commitment": b64(committed(bytes(32)))}
    _add(made, kept, "key", strictjson.dumps(key), about="the commitment of another key", loaded="bundle.key")
    _add_signers(made, kept, sound)
    for fault, (about, change, code) in _ENVELOPES.items():
        envelope = json.loads(made.manifests["good"])
        change(envelope)
        made.manifests[f"manifest-{fault}"] = strictjson.dumps(envelope)
        made.vectors.append(Vector(name=f"manifest-{fault}", manifest=f"manifest-{fault}", about=about, opened=code))


def _add_signers(made: VectorSet, kept: Path, sound: dict[str, Any]) -> None:
    production = {**sound, "purpose": "production", "owner": PRODUCTION.keys.public.key_id}
    _add(
        made,
        kept,
        "simulated",
        strictjson.dumps(production),
        about="a production bundle that simulated evidence opens",
        opened="manifest.purpose",
        owner=PRODUCTION,
    )
    _add(
        made,
        kept,
        "stranger",
        strictjson.dumps({**sound, "owner": STRANGER.keys.public.key_id}),
        about="an owner who is not configured",
        opened="signature.unknown",
        owner=STRANGER,
    )


def _add(made: VectorSet, kept: Path, fault: str, payload: bytes, *, owner: Owner = LAB, **expected: str) -> None:
    name = f"manifest-{fault}"
    made.manifests[name] = signed("manifest", payload, [owner], kept=kept / f"{name}.dsse.json")
    made.vectors.append(Vector(name=name, manifest=name, **expected))
