"""The owner's appraisal policy: which evidence may open the weights, and on what terms (docs/spec/policy.md).

The TOML file that the owner writes and the JSON object inside the signed manifest have the same members, so there is
one reader. Nothing has a default: what an owner did not think of must not be accepted in silence.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, NoReturn

from attestation import strictjson
from attestation.errors import PolicyInvalid
from attestation.nearest import nearest
from attestation.rule import AtLeast, Equals, OneOf, Rule, RuleSpec, Unchecked, read_rule, shown, write_rule
from attestation.simulated import rules as simulated_rules

__all__ = [
    "AppraisalPolicy",
    "AtLeast",
    "Equals",
    "GrantTerms",
    "OneOf",
    "PlatformRules",
    "Rule",
    "ServingPolicy",
    "Unchecked",
]

VERSION: Final = 1
MAX_TOML_BYTES: Final = 64 << 10
MAX_NAME: Final = 64
MAX_SECONDS: Final = 10 * 366 * 86400
MAX_TOKENS: Final = 1 << 24

# What this release can appraise, and the words that are reserved for what it cannot appraise yet.
PLATFORMS: Final[Mapping[str, tuple[RuleSpec, ...]]] = {simulated_rules.PLATFORM: simulated_rules.RULES}
RESERVED_PLATFORMS: Final = ("nvidia", "sev-snp", "tdx", "tpm")

REBOOT_WORDS: Final = ("courier", "broker", "counted")
_REBOOT_AVAILABLE: Final = "courier"

_TOP = ("version", "name", "epoch", "accept", "challenge_seconds", "serving", "grant")


@dataclass(frozen=True, slots=True)
class PlatformRules:
    """The stated rules of one platform, in the platform's own order."""

    platform: str
    rules: tuple[tuple[str, Rule], ...]

    def __getitem__(self, name: str) -> Rule:
        for known, rule in self.rules:
            if known == name:
                return rule
        raise KeyError(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingPolicy:
    """Caps on what the appliance may serve; a configuration may lower them, never raise them.

    Attributes:
        max_context: longest prompt and answer together, tokens.
        max_output_tokens: longest answer, tokens.
        max_concurrent: requests decoded at the same time.
    """

    max_context: int
    max_output_tokens: int
    max_concurrent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantTerms:
    """What a grant under this policy allows.

    Attributes:
        loads: how often the weights may be loaded in one boot.
        seconds: how long a grant lasts from the moment that its request was made, by monotonic time.
        reboot: how the next boot gets its key; ``courier`` is a new grant per boot.
    """

    loads: int
    seconds: int
    reboot: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AppraisalPolicy:
    """All that the owner demands.

    Attributes:
        name: for people, 1 to 64 characters.
        epoch: grows with each policy of the owner.
        accept: the accepted platforms' words.
        challenge_seconds: longest age of a challenge when its request is answered.
        platforms: the rules of each accepted platform, in the order of ``accept``.
        serving: caps on serving.
        grant: terms of a grant.
    """

    name: str
    epoch: int
    accept: tuple[str, ...]
    challenge_seconds: int
    platforms: tuple[PlatformRules, ...]
    serving: ServingPolicy
    grant: GrantTerms

    @property
    def accepts_simulated(self) -> bool:
        """Say whether simulated evidence could open the weights; a production key refuses to sign such a policy."""
        return simulated_rules.PLATFORM in self.accept

    @property
    def digest(self) -> bytes:
        """SHA-384 over the policy's JSON form, 48 bytes."""
        return hashlib.sha384(strictjson.dumps(self.as_payload())).digest()

    def rules(self, platform: str) -> PlatformRules:
        """Give one accepted platform's rules.

        Raises:
            KeyError: the policy does not accept the platform.
        """
        for stated in self.platforms:
            if stated.platform == platform:
                return stated
        raise KeyError(platform)

    def as_payload(self) -> dict[str, Any]:
        """Give the policy as JSON members, the same as those of the TOML file."""
        payload: dict[str, Any] = {
            "version": VERSION,
            "name": self.name,
            "epoch": self.epoch,
            "accept": list(self.accept),
            "challenge_seconds": self.challenge_seconds,
            "serving": asdict(self.serving),
            "grant": asdict(self.grant),
        }
        for stated in self.platforms:
            payload[stated.platform] = {name: write_rule(rule) for name, rule in stated.rules}
        return payload

    @classmethod
    def from_toml(cls, text: str) -> AppraisalPolicy:
        """Read the owner's file.

        Raises:
            PolicyInvalid: ``policy.size``, ``policy.toml``, and all that :meth:`from_payload` raises.
        """
        if len(text) > MAX_TOML_BYTES:
            found = f"{len(text)} characters"
            _refuse("policy.size", found, f"at most {MAX_TOML_BYTES}", "a policy is a page of text; check the file")
        try:
            members = tomllib.loads(text)
        except (ValueError, RecursionError) as error:
            # ValueError covers TOMLDecodeError and what tomllib lets through for absurd numbers and dates.
            found = str(error) if isinstance(error, tomllib.TOMLDecodeError) else "a value that cannot be read"
            _refuse("policy.toml", ascii(found)[1:-1][:200], "TOML 1.0", "correct the policy file at that place")
        return cls.from_payload(members)

    @classmethod
    def from_payload(cls, members: Mapping[str, Any]) -> AppraisalPolicy:
        """Read a policy from its members.

        Raises:
            PolicyInvalid: ``policy.version``, ``policy.missing``, ``policy.unknown``, ``policy.value``,
                ``policy.accept``, ``policy.platform.unavailable``, ``policy.platform.unknown``,
                ``policy.platform.unused``, ``policy.rule.*`` or ``policy.grant.reboot``.
        """
        reader = _Reader(members, "policy", (*_TOP, *PLATFORMS, *RESERVED_PLATFORMS))
        version = reader.integer("version", low=0, high=1 << 16)
        if version != VERSION:
            _refuse("policy.version", str(version), str(VERSION), "write the policy for this release")
        accept = _read_accept(reader)
        policy = cls(
            name=reader.text("name"),
            epoch=reader.integer("epoch", low=0, high=strictjson.MAX_SAFE_INTEGER),
            accept=accept,
            challenge_seconds=reader.integer("challenge_seconds", low=1, high=MAX_SECONDS),
            platforms=tuple(_read_platform(reader, word) for word in accept),
            serving=_read_serving(reader.table("serving", _names(ServingPolicy))),
            grant=_read_grant(reader.table("grant", _names(GrantTerms))),
        )
        reader.end()
        left = reader.left()
        if left is not None:
            expected = f"rules for {', '.join(accept)} only"
            _refuse("policy.platform.unused", f"rules for {left}", expected, f"accept {left}, or remove its rules")
        return policy


def _names(kind: type[ServingPolicy] | type[GrantTerms]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _refuse(code: str, found: str, expected: str, hint: str) -> NoReturn:
    raise PolicyInvalid(code, found=found, expected=expected, hint=hint)


class _Reader:
    """Typed, complete reading of one table; raises only PolicyInvalid.

    Args:
        members: the table.
        where: its name in messages.
        known: all names that may stand in it.
        unknown: the error code for any other.
    """

    def __init__(
        self, members: Mapping[str, Any], where: str, known: tuple[str, ...], unknown: str = "policy.unknown"
    ) -> None:
        self._left = dict(members)
        self._where = where
        self._known = known
        self._unknown = unknown

    def has(self, name: str) -> bool:
        return name in self._left

    def take(self, name: str, expected: str) -> Any:
        if name not in self._left:
            # What is missing is most often there under a misspelt name, so that name is what to report.
            self.end()
            _refuse("policy.missing", f"no {self._where}.{name}", expected, f"state {name}; nothing has a default")
        return self._left.pop(name)

    def integer(self, name: str, *, low: int, high: int) -> int:
        value = self.take(name, f"a whole number from {low} to {high}")
        if type(value) is not int or not low <= value <= high:
            self._wrong(name, value, f"a whole number from {low} to {high}")
        return value

    def text(self, name: str) -> str:
        value = self.take(name, "text")
        if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME or not value.isprintable():
            self._wrong(name, value, f"1 to {MAX_NAME} printable characters")
        return value

    def table(self, name: str, known: tuple[str, ...], unknown: str = "policy.unknown") -> _Reader:
        value = self.take(name, f"a table [{name}]")
        if not isinstance(value, Mapping):
            self._wrong(name, value, f"a table [{name}]")
        return _Reader(value, f"{self._where}.{name}", known, unknown)

    def left(self) -> str | None:
        return min(self._left, default=None)

    def _wrong(self, name: str, value: object, expected: str) -> NoReturn:
        _refuse("policy.value", f"{self._where}.{name} = {shown(value)}", expected, "correct the policy file")

    def end(self) -> None:
        """Refuse a name that is not known, whatever is still to be read."""
        name = min(self._left.keys() - set(self._known), default=None)
        if name is not None:
            _refuse(self._unknown, f"{self._where} with {name[:64]!a}", "known names only", nearest(name, self._known))


def _read_accept(reader: _Reader) -> tuple[str, ...]:
    words = reader.take("accept", "the accepted platforms")
    available = ", ".join(PLATFORMS)
    if not isinstance(words, list) or not words or len(words) > 8 or not all(isinstance(word, str) for word in words):
        _refuse("policy.accept", f"accept = {shown(words)}", "a list of platform words", f"available: {available}")
    if len(set(words)) != len(words):
        _refuse("policy.accept", "a platform twice in accept", "each platform once", "remove the repeated word")
    for word in words:
        if word in RESERVED_PLATFORMS:
            hint = f"accept one of: {available}"
            _refuse("policy.platform.unavailable", word, "a platform that this release can appraise", hint)
        if word not in PLATFORMS:
            known = (*PLATFORMS, *RESERVED_PLATFORMS)
            _refuse("policy.platform.unknown", ascii(word[:32]), f"one of {available}", nearest(word, known))
    return tuple(words)


def _read_platform(reader: _Reader, platform: str) -> PlatformRules:
    specs = PLATFORMS[platform]
    stated = reader.table(platform, tuple(spec.name for spec in specs), "policy.rule.unknown")
    rules: list[tuple[str, Rule]] = []
    for spec in specs:
        where = f"{platform}.{spec.name}"
        if not stated.has(spec.name):
            stated.end()
            hint = f"state {where}: {spec.meaning}"
            _refuse("policy.rule.missing", f"no {where}", "every rule of an accepted platform stated", hint)
        rules.append((spec.name, read_rule(spec, stated.take(spec.name, "a rule"), where)))
    stated.end()
    return PlatformRules(platform, tuple(rules))


def _read_serving(reader: _Reader) -> ServingPolicy:
    serving = ServingPolicy(
        max_context=reader.integer("max_context", low=1, high=MAX_TOKENS),
        max_output_tokens=reader.integer("max_output_tokens", low=1, high=MAX_TOKENS),
        max_concurrent=reader.integer("max_concurrent", low=1, high=4096),
    )
    reader.end()
    return serving


def _read_grant(reader: _Reader) -> GrantTerms:
    terms = GrantTerms(
        loads=reader.integer("loads", low=1, high=1000),
        seconds=reader.integer("seconds", low=1, high=MAX_SECONDS),
        reboot=reader.text("reboot"),
    )
    if terms.reboot not in REBOOT_WORDS:
        hint = nearest(terms.reboot, REBOOT_WORDS)
        _refuse("policy.grant.reboot", ascii(terms.reboot), _REBOOT_AVAILABLE, hint)
    if terms.reboot != _REBOOT_AVAILABLE:
        hint = "this release knows one way to get a key after a reboot: a new grant by courier"
        _refuse("policy.grant.reboot", terms.reboot, _REBOOT_AVAILABLE, hint)
    reader.end()
    return terms
