"""SecretBytes: the only home of key bytes.

The bytes live in a ``memfd_secret`` mapping, which the kernel takes out of its own direct map and zeroes when the
process ends, however it ends; or, where the kernel has no such memory, in locked private pages that are kept out of
dumps and of children. Without either a secret is refused: it never falls back to the ordinary heap.

Theory of operation: a ctypes array stands for the mapping. Every memoryview that :meth:`SecretBytes.expose` gives,
and every slice of it, holds a reference to that array; the mapping is overwritten and unmapped when the last one is
gone. So a stray slice can read zeros after a wipe, but never unmapped memory.

What this does not give: control over copies inside libraries, and registers (docs/limitations.md).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from collections.abc import Iterator
from typing import Any, Final, Literal, NoReturn, final

from provisioning.errors import InputFailed, KeyRefused, SecretMemoryRefused

Protection = Literal["memfd_secret", "locked"]

MAX_SECRET_BYTES: Final = 1 << 20

# memfd_secret(2): one number on all architectures with the generic system call table and on x86-64.
_SYS_MEMFD_SECRET: Final = 447
# Python 3.11 names neither of these in ``mmap`` on every build (linux/mman.h).
_MADV_DONTFORK: Final = 10
_MADV_DONTDUMP: Final = 16
_MADV_WIPEONFORK: Final = 18
_MAP_FAILED: Final = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.getrandom.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
_libc.getrandom.restype = ctypes.c_ssize_t

# By id, since a secret has no hash.
_live: weakref.WeakValueDictionary[int, SecretBytes] = weakref.WeakValueDictionary()


def _map(length: int, flags: int, descriptor: int) -> int | None:
    address: int | None = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, flags, descriptor, 0)
    return None if address in (None, _MAP_FAILED) else address


def _map_memfd_secret(length: int) -> int | None:
    """Map secret memory, or give None where the kernel or a filter does not offer it."""
    descriptor: int = _libc.syscall(_SYS_MEMFD_SECRET, os.O_CLOEXEC)
    if descriptor < 0:
        return None
    try:
        os.ftruncate(descriptor, length)
        address = _map(length, mmap.MAP_SHARED, descriptor)
    except OSError:
        return None
    finally:
        # Closed at once: who can take descriptors of this process could map the pages a second time.
        os.close(descriptor)
    if address is None:
        return None
    if _libc.madvise(address, length, _MADV_DONTFORK) != 0:
        _libc.munmap(address, length)
        return None
    return address


def _map_locked(length: int) -> int | None:
    """Map private pages that are locked, in no dump and in no child, or give None when any of that fails."""
    address = _map(length, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1)
    if address is None:
        return None
    locked = _libc.mlock(address, length) == 0
    undumped = _libc.madvise(address, length, _MADV_DONTDUMP) == 0
    unshared = (
        _libc.madvise(address, length, _MADV_WIPEONFORK) == 0 or _libc.madvise(address, length, _MADV_DONTFORK) == 0
    )
    if locked and undumped and unshared:
        return address
    reason = ctypes.get_errno()
    _libc.munmap(address, length)
    ctypes.set_errno(reason)
    return None


def _release(address: int, length: int, owner: int) -> None:
    """Overwrite and unmap; in a child the pages are not there, so nothing is touched."""
    if os.getpid() == owner:
        ctypes.memset(address, 0, length)
        _libc.munmap(address, length)


@atexit.register
def _wipe_all() -> None:
    # Locked pages, unlike secret memory, are not zeroed by the kernel when the process ends.
    for secret in list(_live.values()):
        secret.wipe()


@final
class SecretBytes:
    """A fixed number of secret bytes.

    There is no text, bytes, equality, hash, copy or pickle of it. The content starts as zeros. Only the process that
    made it can use it.

    Args:
        size: how many bytes, 1 to 1 MiB. Each secret takes whole pages of lockable memory.

    Raises:
        SecretMemoryRefused: ``secret.memory`` when the system gives no protected memory.
    """

    __slots__ = ("__weakref__", "_array", "_owner", "_size", "_wiped", "protection")

    protection: Protection

    def __init__(self, size: int) -> None:
        if not 1 <= size <= MAX_SECRET_BYTES:
            raise ValueError(f"a secret of {size} bytes")
        length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.protection = "memfd_secret"
        address = _map_memfd_secret(length)
        if address is None:
            self.protection = "locked"
            address = _map_locked(length)
        if address is None:
            number = ctypes.get_errno()
            raise SecretMemoryRefused(
                "secret.memory",
                found=f"no lockable memory ({errno.errorcode.get(number, number)})",
                expected=f"{length} bytes of locked memory",
                hint="raise RLIMIT_MEMLOCK (LimitMEMLOCK= in the unit, ulimit -l in a shell)",
            )
        self._array: ctypes.Array[ctypes.c_ubyte] | None = (ctypes.c_ubyte * size).from_address(address)
        self._owner = os.getpid()
        self._size = size
        self._wiped = False
        # At exit pages are wiped but not unmapped: another thread may still be looking at them.
        weakref.finalize(self._array, _release, address, length, self._owner).atexit = False
        ctypes.memset(address, 0, length)
        _live[id(self)] = self

    @classmethod
    def random(cls, size: int) -> SecretBytes:
        """Make a secret from the kernel's random source, written straight into the protected pages."""
        secret = cls(size)
        start = ctypes.addressof(secret._buffer())
        done = 0
        while done < size:
            count = _libc.getrandom(start + done, size - done, 0)
            if count < 0 and ctypes.get_errno() != errno.EINTR:
                raise SecretMemoryRefused(
                    "secret.random",
                    found=errno.errorcode.get(ctypes.get_errno(), "an error"),
                    expected="random bytes from the kernel",
                    hint="allow the getrandom system call",
                )
            done += max(count, 0)
        return secret

    @classmethod
    def take(cls, source: bytearray | memoryview) -> SecretBytes:
        """Move bytes in: copies them, then overwrites the source.

        Args:
            source: a writable buffer, at least one byte.
        """
        with memoryview(source) as whole, whole.cast("B") as octets:
            if octets.readonly:
                raise TypeError("the source of a secret must be writable, so that it can be wiped")
            secret = cls(len(octets))
            with secret.expose() as view:
                view[:] = octets
            octets[:] = bytes(len(octets))
        return secret

    @classmethod
    def read(cls, descriptor: int, size: int) -> SecretBytes:
        """Read exactly ``size`` bytes from a descriptor into protected pages, with no copy on the way.

        Raises:
            InputFailed: ``secret.short`` when the descriptor ends before.
        """
        secret = cls(size)
        done = 0
        with secret.expose() as view:
            while done < size:
                with view[done:] as rest:
                    count = os.readv(descriptor, [rest])
                if count == 0:
                    raise InputFailed(
                        "secret.short",
                        found=f"{done} bytes",
                        expected=f"{size} bytes of a secret",
                        hint="the other side stopped early; look at its messages",
                    )
                done += count
        return secret

    def _buffer(self) -> ctypes.Array[ctypes.c_ubyte]:
        if self._array is None or self._wiped or os.getpid() != self._owner:
            raise KeyRefused(
                "secret.wiped",
                found="a secret that was wiped, or is of another process",
                expected="a live secret",
                hint="start the command or the agent again; a loaded grant cannot be used twice",
            )
        return self._array

    @contextlib.contextmanager
    def expose(self) -> Iterator[memoryview]:
        """Give a writable view of the bytes for the length of a ``with`` block.

        Raises:
            KeyRefused: ``secret.wiped`` after a wipe: a wiped secret must never pass for a key of zeros.
        """
        with memoryview(self._buffer()) as base, base.cast("B") as view:
            yield view

    def wipe(self) -> None:
        """Overwrite the bytes with zeros, also under views that are still open. May be called again."""
        self._wiped = True
        if self._array is not None and os.getpid() == self._owner:
            ctypes.memset(ctypes.addressof(self._array), 0, self._size)

    def close(self) -> None:
        """Wipe, and give the memory back once no view of it is left. May be called again."""
        self.wipe()
        self._array = None

    def __len__(self) -> int:
        return self._size

    def __enter__(self) -> SecretBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<SecretBytes of {self._size} bytes>"

    def __str__(self) -> NoReturn:
        raise TypeError("a secret has no text form")

    def __format__(self, spec: str) -> NoReturn:
        raise TypeError("a secret has no text form")

    def __bytes__(self) -> NoReturn:
        raise TypeError("a secret has no bytes form; use expose()")

    def __eq__(self, other: object) -> NoReturn:
        raise TypeError("secrets are not compared")

    __hash__ = None  # type: ignore[assignment]  # a hash would be a digest of the key

    def __copy__(self) -> NoReturn:
        raise TypeError("a secret cannot be copied")

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError("a secret cannot be copied")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("a secret cannot be pickled")
