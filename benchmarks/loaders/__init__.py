"""One module per loader that is compared, behind the interface of ``benchmarks.loaders.contender``.

A loader whose package is absent or does not work is reported with the reason; it never fails the run, and is never left
out in silence.
"""

from __future__ import annotations

import importlib

from benchmarks.loaders.contender import Contender

# Name to module and class, in the order of the table. Modules are imported in the process that runs them only.
_CLASSES = {
    "ours": ("ours", "Ours"),
    "aes": ("aes", "Aes"),
    "read": ("read", "Buffered"),
    "read_direct": ("read", "Direct"),
    "safetensors_load": ("safetensors", "LoadFile"),
    "safetensors_open": ("safetensors", "SafeOpen"),
    "runai": ("runai", "RunAi"),
    "fastsafetensors": ("fastsafetensors", "FastSafetensors"),
    "flashpack": ("flashpack", "FlashPack"),
    "tensorizer": ("tensorizer", "Tensorizer"),
    "tensorizer_encrypted": ("tensorizer", "TensorizerEncrypted"),
    "cryptotensors": ("cryptotensors", "CryptoTensors"),
}

NAMES = tuple(_CLASSES)
# A cipher has no cold run, and past a cache that has the file already there is nothing to be learnt.
ONE_STATE = {"aes": "warm", "read_direct": "cold"}
# These read a format of their own, as large as the model; the others read the safetensors files.
CONVERTED = ("ours", "flashpack", "tensorizer", "tensorizer_encrypted", "cryptotensors")


def find(name: str) -> type[Contender]:
    """Give a contender's class.

    Raises:
        KeyError: no such contender.
        ImportError: its package is not installed here.
    """
    module, attribute = _CLASSES[name]
    found: type[Contender] = getattr(importlib.import_module(f"benchmarks.loaders.{module}"), attribute)
    return found
