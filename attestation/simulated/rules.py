"""The policy rules of the platform ``simulated`` (docs/spec/policy.md): all of them must be stated."""

from __future__ import annotations

from typing import Final

from attestation.result import SIMULATED_PLATFORM
from attestation.rule import RuleSpec

PLATFORM: Final = SIMULATED_PLATFORM

DIGEST_BYTES: Final = 48
IDENTITY_BYTES: Final = 32

CC_MODES: Final = ("on", "off", "devtools")

RULES: Final = (
    RuleSpec(
        name="root",
        kind="hex",
        # No "unchecked": without a pinned root anybody's self-made root would be genuine.
        operators=("equals", "one_of"),
        hex_bytes=DIGEST_BYTES,
        meaning="the SHA-384 of the laboratory root's public keys",
        hint="use evidence of the laboratory whose root the policy pins, or pin this one in a new policy",
    ),
    RuleSpec(
        name="chip_id",
        kind="hex",
        operators=("equals", "one_of", "unchecked"),
        hex_bytes=IDENTITY_BYTES,
        meaning="the identity of the simulated processor",
        hint="this is another machine; use the one that the policy names, or name this one in a new policy",
    ),
    RuleSpec(
        name="measurement",
        kind="hex",
        operators=("equals", "one_of", "unchecked"),
        hex_bytes=DIGEST_BYTES,
        meaning="the SHA-384 over the installed product",
        hint="install the release that the policy names",
    ),
    RuleSpec(
        name="tcb",
        kind="integer",
        operators=("equals", "one_of", "at_least", "unchecked"),
        hex_bytes=0,
        meaning="the version of the simulated firmware",
        hint="raise tcb in the laboratory's machine.json, as a firmware update would, then request again",
    ),
    RuleSpec(
        name="debug",
        kind="flag",
        operators=("equals", "unchecked"),
        hex_bytes=0,
        meaning="whether the host may read the machine's memory",
        hint="start the machine without debugging, then request again",
    ),
    RuleSpec(
        name="devices",
        kind="integer",
        operators=("equals", "one_of"),
        hex_bytes=0,
        meaning="how many devices there must be, exactly",
        hint="check that every device is present and none was added, then request again",
    ),
    RuleSpec(
        name="device_model",
        kind="text",
        operators=("equals", "one_of", "unchecked"),
        hex_bytes=0,
        meaning="the model of every device",
        hint="use devices of a model that the policy accepts",
    ),
    RuleSpec(
        name="device_measurement",
        kind="hex",
        operators=("equals", "one_of", "unchecked"),
        hex_bytes=DIGEST_BYTES,
        meaning="the SHA-384 over every device's firmware",
        hint="install the device firmware that the policy names",
    ),
    RuleSpec(
        name="cc_mode",
        kind="text",
        operators=("equals", "one_of", "unchecked"),
        hex_bytes=0,
        meaning="the confidential-computing mode of every device",
        hint="switch confidential computing on for the device, then request again",
    ),
)
