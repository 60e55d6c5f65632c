"""What must be there before an agent starts: found out now, and not after the owner's grant is spent."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from appliance import pages
from appliance.config import Config
from appliance.errors import ConfigError, DeviceFault
from attestation.errors import reason_of

# One of each part of the node's installation that a child process needs.
_NODE_PACKAGES = ("torch", "starlette", "tokenizers")


def require_installation() -> None:
    """Refuse to run an appliance from an owner's installation.

    Raises:
        ConfigError: ``install.node``.
    """
    missing = [name for name in _NODE_PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            "install.node",
            found=f"an installation without {', '.join(missing)}",
            expected="the installation of an appliance",
            hint="make install-node on this machine",
        )


def require_places(config: Config) -> None:
    """Check that the paths and devices of a configuration exist.

    Raises:
        ConfigError: ``config.path``.
        DeviceFault: ``device.absent``.
    """
    places = {
        "model.bundle": config.model.bundle,
        "model.owner_key": config.model.owner_key,
        "platform.lab_dir": config.platform.lab_dir,
    }
    for key, path in places.items():
        if not path.exists():
            raise ConfigError(
                "config.path",
                found=f"{key} = {path}, which is not there",
                expected="an existing path",
                hint="mount the medium, or change the key",
            )
    for slot in config.devices.slots:
        node = Path(f"/dev/nvidia{slot.removeprefix('cuda:')}")
        if slot != "cpu" and not node.exists():
            raise DeviceFault(
                "device.absent",
                found=f"devices.slots names {slot}, but there is no {node}",
                expected="the device of a loaded driver",
                hint="load the driver, or change devices.slots",
            )


def require_ring(config: Config, *, segment_bytes: int) -> None:
    """Check that a ring of the configured size can hold a segment of the bundle.

    Raises:
        ConfigError: ``ring.size``; a rank would say the same, but only when the owner's grant is spent.
    """
    asked = config.loading.ring_mib << 20
    least = segment_bytes + pages.PAGE
    if asked and asked < least:
        raise ConfigError(
            "ring.size",
            found=f"loading.ring_mib = {config.loading.ring_mib}",
            expected=f"at least {-(-least >> 20)}, for one segment of this bundle and a page",
            hint="raise loading.ring_mib, or set it to 0",
        )


def make_public_directory(path: Path) -> None:
    """Make the runtime directory, open to operators and viewers, or take an existing one as it is.

    Raises:
        ConfigError: ``config.runtime_dir``.
    """
    try:
        if not path.is_dir():
            path.mkdir(parents=True)
            path.chmod(0o755)  # the umask would keep operators and viewers from the socket
    except OSError as error:
        raise _runtime_dir(path, error) from None


def write_public(path: Path, data: bytes) -> None:
    """Write a file of the runtime directory that everyone on this machine may read.

    Raises:
        ConfigError: ``config.runtime_dir``.
    """
    try:
        path.write_bytes(data)
        path.chmod(0o644)
    except OSError as error:
        raise _runtime_dir(path, error) from None


def _runtime_dir(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        "config.runtime_dir",
        found=f"{path}: {reason_of(error)}",
        expected="a directory that the agent can write",
        hint="change node.runtime_dir, or remove what is in the way",
    )
