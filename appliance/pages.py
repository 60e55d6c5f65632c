"""Anonymous pages of this process alone: out of core dumps, out of children, and locked where that is asked for.

A plain ``mmap.mmap(-1, n)`` is shared memory in Python: children would see it and the kernel could write it to swap as
a file page. So every mapping here is private. Direct reads from a disk land in it, which ``memfd_secret`` memory does
not allow; that one is for keys (provisioning/secret.py).
"""

from __future__ import annotations

import ctypes
import mmap
import resource
from pathlib import Path

from appliance.errors import ConfigError, DeviceFault

PAGE = mmap.PAGESIZE

# Transparent huge pages of x86-64 and arm64 with 4 KiB pages; below this size asking for them is pointless.
_HUGE = 2 << 20

# capabilities(7): memory may be locked beyond the limit.
_CAP_IPC_LOCK = 14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t)


def round_up(nbytes: int, unit: int) -> int:
    """Give the smallest multiple of ``unit`` that is at least ``nbytes``."""
    return -(-nbytes // unit) * unit


def map_private(nbytes: int) -> mmap.mmap:
    """Map zeroed private pages that no core dump and no child will hold.

    Raises:
        DeviceFault: ``slot.memory`` when the kernel has no room.
    """
    # The kernel lays a mapping out for huge pages only when it is whole huge pages long.
    length = round_up(max(nbytes, 1), _HUGE if nbytes >= _HUGE else PAGE)
    try:
        pages = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise DeviceFault(
            "slot.memory",
            found=f"no room for {nbytes} bytes ({error.strerror})",
            expected="enough free memory for the model, its cache and the ring",
            hint="stop other programs, lower engine.kv_cache_mib or loading.ring_mib, or use a larger machine",
        ) from None
    pages.madvise(mmap.MADV_DONTDUMP)
    pages.madvise(mmap.MADV_DONTFORK)
    if length >= _HUGE:
        # Half a million page faults per 2 GB cost more than the decryption; huge pages make them a thousand.
        pages.madvise(mmap.MADV_HUGEPAGE)
    return pages


def address(pages: mmap.mmap) -> int:
    """Give the address of the first byte."""
    return ctypes.addressof(ctypes.c_ubyte.from_buffer(pages))


def lock(pages: mmap.mmap, nbytes: int) -> bool:
    """Keep the first bytes in memory and say whether the kernel agreed; first raises the soft limit to the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))
    return bool(_libc.mlock(address(pages), nbytes) == 0)


def lockable() -> int | None:
    """Give how many bytes this process may lock, as far as the limit goes; None for no limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if hard == resource.RLIM_INFINITY or _capabilities() >> _CAP_IPC_LOCK & 1:
        return None
    return hard


def _capabilities() -> int:
    """Give the effective capabilities (proc(5), CapEff); none where the kernel does not say."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in text.splitlines() if line.startswith("CapEff:")), 0)


def map_locked(nbytes: int) -> mmap.mmap:
    """Map private pages that are never written to swap, for plaintext on its way to a device.

    Raises:
        ConfigError: ``ring.memlock`` when the limit on locked memory is too small; plaintext never falls back to
            memory that can be swapped.
        DeviceFault: ``slot.memory`` when the kernel has no room.
    """
    pages = map_private(nbytes)
    if not lock(pages, nbytes):
        limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        raise ConfigError(
            "ring.memlock",
            found=f"{nbytes} bytes cannot be locked, the limit is {limit}",
            expected="a ring in locked memory",
            hint="raise the limit (LimitMEMLOCK= in the unit, ulimit -l in a shell) or lower loading.ring_mib",
        )
    return pages
