"""A look at the ciphertext of warm files: a read-only mapping, filled a stretch at a time and dropped behind.

Pages are brought in by a call that reports an error of the medium; touching them would be answered with SIGBUS. Only
ciphertext is here, and only of files that :mod:`appliance.filesystem` accepts.
"""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np

from appliance import pages

# Of Linux 5.14 and later (madvise(2)); Python has no name for it.
_MADV_POPULATE_READ = 22

_libc = ctypes.CDLL(None, use_errno=True)
# Through ctypes, which lets other threads run meanwhile; the method of mmap does not.
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Window:
    """Maps one file at a time; belongs to one thread."""

    __slots__ = ("_address", "_descriptor", "_mapping", "_view")

    def __init__(self) -> None:
        self._descriptor = -1
        self._mapping: mmap.mmap | None = None
        self._view = memoryview(b"")
        self._address = 0

    def show(self, descriptor: int, size: int, offset: int, length: int) -> memoryview:
        """Give ``length`` bytes of a file.

        Args:
            descriptor: of the file.
            size: of the file, bytes.
            offset: a multiple of the page size.
            length: how many bytes, all within the file.

        Raises:
            OSError: the medium does not give them, or the file has become shorter.
        """
        if descriptor != self._descriptor:
            self._map(descriptor, size)
        self._advise(offset, length, _MADV_POPULATE_READ)
        return self._view[offset : offset + length]

    def drop(self, offset: int, length: int) -> None:
        """Take the pages of a stretch out of this process again; they stay in the page cache."""
        self._advise(offset, length, mmap.MADV_DONTNEED)

    def _map(self, descriptor: int, size: int) -> None:
        self.close()
        try:
            self._mapping = mmap.mmap(descriptor, size, prot=mmap.PROT_READ)
        except ValueError:
            raise OSError(0, f"the file has fewer than {size} bytes") from None
        self._descriptor = descriptor
        self._view = memoryview(self._mapping)
        # numpy gives the address of a mapping that may not be written to.
        self._address = np.frombuffer(self._mapping, np.uint8).ctypes.data

    def _advise(self, offset: int, length: int, advice: int) -> None:
        if _libc.madvise(self._address + offset, length, advice) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def close(self) -> None:
        """Unmap as soon as no view is left. May be called again."""
        self._descriptor = -1
        self._view = memoryview(b"")
        self._mapping = None


def can_populate() -> bool:
    """Say whether this kernel (5.14 and later) fills mappings on demand."""
    page = pages.map_private(pages.PAGE)
    return bool(_libc.madvise(pages.address(page), pages.PAGE, _MADV_POPULATE_READ) == 0)
