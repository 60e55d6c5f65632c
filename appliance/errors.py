"""Refusals of the running machine; the shape is attestation.errors.LetheError."""

from __future__ import annotations

from attestation.errors import LetheError


class ConfigError(LetheError):
    """The configuration file cannot be used."""

    exit_status = 78


class DeviceFault(LetheError):
    """A device failed, is missing, or has too little memory."""

    exit_status = 8


class ModelUnsupported(LetheError):
    """The sealed model is genuine, but this engine cannot run it."""

    exit_status = 8


class ZeroizeIncomplete(LetheError):
    """Something could not be shown to be zero: the machine must be powered off."""

    exit_status = 9


class Unrecorded(LetheError):
    """The wipe was shown, but its record could not be written."""

    exit_status = 74


class NotServing(LetheError):
    """The appliance is sealed or unprovisioned."""

    exit_status = 10


class StateRefused(LetheError):
    """The command does not fit the state that the agent is in."""

    exit_status = 6


class AgentUnreachable(LetheError):
    """No agent answers on the control socket."""

    exit_status = 69


class JournalError(LetheError):
    """The journal cannot be written or is not whole."""

    exit_status = 74


class NotPermitted(LetheError):
    """The caller's user or group may not do this."""

    exit_status = 77


class ProtocolError(LetheError):
    """A message between processes is malformed."""

    exit_status = 1


class RequestRefused(LetheError):
    """One inference request cannot be run; others go on."""

    exit_status = 1
