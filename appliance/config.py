"""One TOML file, one frozen value.

Unknown keys are refused with the nearest name; nothing has an environment variable or a second place to be set. The
SHA-384 of the file's bytes is part of the attestation request.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints

from appliance.errors import ConfigError
from attestation.errors import reason_of
from attestation.nearest import nearest

DEFAULT_PATH = Path("/etc/lethe/lethe.toml")
_NODE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")


@dataclass(frozen=True, slots=True)
class Node:
    """``[node]``: what this machine is called and where it may write.

    Attributes:
        name: lower-case letters, digits and hyphens; it is shown in requests and asked for before a wipe.
        state_dir: journal and wipe records; survives reboots, never holds a secret.
        runtime_dir: control socket and the API's public certificate.
    """

    name: str
    state_dir: Path = Path("/var/lib/lethe")
    runtime_dir: Path = Path("/run/lethe")


@dataclass(frozen=True, slots=True)
class Model:
    """``[model]``: the sealed bundle and the owner key that must have signed it."""

    bundle: Path
    owner_key: Path


@dataclass(frozen=True, slots=True)
class Platform:
    """``[platform]``: which evidence this machine gives.

    Attributes:
        kind: ``simulated``; never detected by itself.
        lab_dir: laboratory root and platform key, made by ``lethe lab-root``.
    """

    kind: str
    lab_dir: Path


@dataclass(frozen=True, slots=True)
class Devices:
    """``[devices]``: where the weights go.

    Attributes:
        slots: device names, ``cpu`` or ``cuda:N``.
        dtype: ``auto`` is float32 on a CPU and the file's own type on a GPU.
        compute_threads: CPU threads for arithmetic; 0 takes one per usable core.
    """

    slots: tuple[str, ...] = ("cpu",)
    dtype: str = "auto"
    compute_threads: int = 0


@dataclass(frozen=True, slots=True)
class Loading:
    """``[loading]``: the pipeline. 0 lets the rank choose by cores, ranks and device (appliance/budget.py).

    Attributes:
        ring_mib: staging memory, the bound on plaintext in host memory, per device.
        readers: threads that read.
        openers: threads that decrypt and copy.
        open_on: who decrypts weights, ``host`` or ``device``.
    """

    ring_mib: int = 0
    readers: int = 0
    openers: int = 0
    open_on: str = "host"


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """``[engine]``: memory for the KV cache, per device."""

    kv_cache_mib: int = 512


@dataclass(frozen=True, slots=True)
class Api:
    """``[api]``: the door for clients.

    Attributes:
        host, port: where to listen.
        tls: HTTPS with a key made in memory; its digest is in the attestation request.
        keys_file: client keys as salted hashes; managed with ``lethe apikey``.
        model: the name that clients use.
        max_body_kib: largest request body.
        max_queue: requests admitted at once; more are told to come back later.
        request_seconds: longest time for one request, and for draining.
    """

    keys_file: Path
    host: str = "127.0.0.1"
    port: int = 8443
    tls: bool = True
    model: str = "sealed"
    max_body_kib: int = 1024
    max_queue: int = 64
    request_seconds: int = 600


@dataclass(frozen=True, slots=True)
class Control:
    """``[control]``: Unix groups that may use the control socket; root and the agent's own user always may."""

    operator_group: str = "lethe-operator"
    viewer_group: str = "lethe-viewer"


@dataclass(frozen=True, slots=True)
class Config:
    """The whole file, and the SHA-384 of its bytes."""

    node: Node
    model: Model
    platform: Platform
    api: Api
    digest: bytes
    devices: Devices = field(default_factory=Devices)
    loading: Loading = field(default_factory=Loading)
    engine: EngineMemory = field(default_factory=EngineMemory)
    control: Control = field(default_factory=Control)

    @property
    def control_socket(self) -> Path:
        """Where operators and the console reach the agent."""
        return self.node.runtime_dir / "control.sock"

    @property
    def certificate(self) -> Path:
        """Where clients of this machine find the API's public certificate."""
        return self.node.runtime_dir / "api-cert.pem"

    @property
    def journal(self) -> Path:
        """The node's own record."""
        return self.node.state_dir / "journal.jsonl"


_SECTIONS: dict[str, type[Any]] = {name: kind for name, kind in get_type_hints(Config).items() if name != "digest"}

_RANGES: dict[str, tuple[int, int]] = {
    "devices.compute_threads": (0, 1024),
    "loading.ring_mib": (0, 65536),
    "loading.readers": (0, 64),
    "loading.openers": (0, 64),
    "engine.kv_cache_mib": (1, 1 << 20),
    "api.port": (0, 65535),
    "api.max_body_kib": (1, 65536),
    "api.max_queue": (1, 65536),
    "api.request_seconds": (1, 86400),
}
_CHOICES: dict[str, tuple[str, ...]] = {
    "platform.kind": ("simulated",),
    "devices.dtype": ("auto", "float32", "bfloat16", "float16"),
    "loading.open_on": ("host", "device"),
}


def load(path: Path) -> Config:
    """Read and check a configuration file.

    Relative paths in it are relative to the file's own directory.

    Raises:
        ConfigError: ``config.*``; every error names the key.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            "config.file",
            found=f"{path}: {reason_of(error)}",
            expected="a readable configuration file",
            hint="name it with --config, or write it after docs/configuration.md",
        ) from None
    return parse(data, base=path.parent)


def parse(data: bytes, *, base: Path) -> Config:
    """Read a configuration from its bytes; see :func:`load`."""
    try:
        document = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            "config.syntax", found=str(error).lower(), expected="TOML in UTF-8", hint="mend the file at that place"
        ) from None
    _refuse_unknown(document, _SECTIONS, "")
    sections = {name: _section(name, kind, document.get(name, {}), base) for name, kind in _SECTIONS.items()}
    config = Config(**sections, digest=hashlib.sha384(data).digest())
    _check_meaning(config)
    return config


def _refuse_unknown(given: dict[str, Any], known: Any, prefix: str) -> None:
    for name in given:
        if name not in known:
            raise ConfigError(
                "config.unknown",
                found=f"{prefix}{name}",
                expected="a key of docs/configuration.md",
                hint=nearest(f"{prefix}{name}", [f"{prefix}{other}" for other in known]),
            )


def _section(name: str, kind: type[Any], given: Any, base: Path) -> Any:
    if not isinstance(given, dict):
        raise ConfigError(
            "config.type", found=f"{name} = {given!r}", expected=f"a table [{name}]", hint="see docs/configuration.md"
        )
    members = {member.name: member for member in fields(kind)}
    _refuse_unknown(given, members, f"{name}.")
    hints = get_type_hints(kind)
    values = {
        key: _value(f"{name}.{key}", hints[key], given[key], base) if key in given else _default(name, member)
        for key, member in members.items()
    }
    return kind(**values)


def _default(section: str, member: Field[Any]) -> Any:
    if member.default is MISSING:
        raise ConfigError(
            "config.missing",
            found=f"no {section}.{member.name}",
            expected="a value",
            hint="add it; docs/configuration.md has an example",
        )
    return member.default


def _value(key: str, kind: Any, given: Any, base: Path) -> Any:
    if kind is Path and isinstance(given, str) and given:
        return base / given
    if kind == tuple[str, ...] and isinstance(given, list) and all(isinstance(item, str) for item in given):
        return tuple(given)
    if kind in (str, bool, int) and type(given) is kind:
        return _bounded(key, given)
    names = {
        Path: "a path",
        tuple[str, ...]: "a list of text",
        str: "text",
        bool: "true or false",
        int: "a whole number",
    }
    raise ConfigError("config.type", found=f"{key} = {given!r}", expected=names[kind], hint="see docs/configuration.md")


def _bounded(key: str, given: Any) -> Any:
    if key in _RANGES and not _RANGES[key][0] <= given <= _RANGES[key][1]:
        low, high = _RANGES[key]
        raise ConfigError(
            "config.range", found=f"{key} = {given}", expected=f"{low} to {high}", hint="change the value"
        )
    if key in _CHOICES and given not in _CHOICES[key]:
        raise ConfigError(
            "config.choice", found=f"{key} = {given!r}", expected=" or ".join(_CHOICES[key]), hint="change the value"
        )
    return given


def _check_meaning(config: Config) -> None:
    if not _NODE_NAME.fullmatch(config.node.name):
        raise ConfigError(
            "config.node.name",
            found=repr(config.node.name[:70]),
            expected="1 to 63 lower-case letters, digits and hyphens",
            hint="change node.name",
        )
    if len(config.devices.slots) != 1 or not re.fullmatch(r"cpu|cuda:\d{1,2}", config.devices.slots[0]):
        raise ConfigError(
            "config.devices.slots",
            found=repr(list(config.devices.slots)),
            expected='one device: "cpu" or "cuda:N"',
            hint="this release runs the engine on one device; see docs/limitations.md",
        )
    if config.loading.open_on == "device" and "cpu" in config.devices.slots:
        raise ConfigError(
            "config.loading.open_on",
            found="opening on the device, with cpu among devices.slots",
            expected="host: the memory of that device is the host's",
            hint="set loading.open_on to host",
        )
