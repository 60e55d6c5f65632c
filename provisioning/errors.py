"""Refusals of the exchange and of sealed bundles; the shape is attestation.errors.LetheError."""

from __future__ import annotations

from attestation.errors import LetheError


class ExchangeRefused(LetheError):
    """A challenge, key request, grant or manifest is genuine in form, but must not be accepted."""

    exit_status = 6


class KeyRefused(LetheError):
    """An owner key cannot be opened, or must not be used for this."""

    exit_status = 6


class BundleDamaged(LetheError):
    """A sealed bundle is damaged, incomplete or not authentic."""

    exit_status = 7


class ModelRefused(LetheError):
    """A model directory cannot be packed as it is."""

    exit_status = 2


class InputFailed(LetheError):
    """A file or directory named by the caller cannot be read."""

    exit_status = 2


class OutputFailed(LetheError):
    """An output cannot be written, or must not be overwritten."""

    exit_status = 74


class LedgerError(LetheError):
    """The owner's ledger cannot be written or is not whole."""

    exit_status = 74


class WipeIncomplete(LetheError):
    """A wipe record says that something could not be shown to be zero."""

    exit_status = 9


class SecretMemoryRefused(LetheError):
    """The system gives no memory that may hold a key: locked, and kept out of dumps and children."""

    exit_status = 78
