from __future__ import annotations

import copy
import ctypes
import errno
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from provisioning import secret as module
from provisioning.errors import InputFailed, KeyRefused, SecretMemoryRefused
from provisioning.secret import MAX_SECRET_BYTES, SecretBytes


@pytest.fixture(params=["memfd_secret", "locked"])
def protection(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "locked":
        monkeypatch.setattr(module, "_map_memfd_secret", lambda length: None)
    elif SecretBytes(1).protection != "memfd_secret":
        pytest.skip("this kernel has no memfd_secret")
    return str(request.param)


def test_starts_as_zeros_of_the_asked_size(protection: str) -> None:
    with SecretBytes(33) as secret, secret.expose() as view:
        assert secret.protection == protection
        assert bytes(view) == bytes(33)
        assert len(secret) == 33


def test_random_secrets_differ_and_are_not_zero(protection: str) -> None:
    with SecretBytes.random(32) as one, SecretBytes.random(32) as two, one.expose() as first, two.expose() as second:
        assert bytes(first) != bytes(second)
        assert bytes(32) not in (bytes(first), bytes(second))


def test_take_wipes_its_source(protection: str) -> None:
    source = bytearray(b"a key of some bytes")
    with SecretBytes.take(source) as secret, secret.expose() as view:
        assert bytes(view) == b"a key of some bytes"
    assert source == bytes(19)


def test_take_refuses_a_source_that_it_cannot_wipe() -> None:
    with pytest.raises(TypeError, match="writable"):
        SecretBytes.take(memoryview(b"immutable"))


def test_read_takes_exactly_the_asked_bytes() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"0123456789")
    with SecretBytes.read(reader, 4) as secret, secret.expose() as view:
        assert bytes(view) == b"0123"
    assert os.read(reader, 10) == b"456789"
    os.close(reader)
    os.close(writer)


def test_read_refuses_a_descriptor_that_ends_early() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"0123")
    os.close(writer)
    with pytest.raises(InputFailed) as caught:
        SecretBytes.read(reader, 32)
    assert caught.value.code == "secret.short"
    os.close(reader)


def test_wipe_zeroes_under_an_open_view(protection: str) -> None:
    secret = SecretBytes.random(32)
    with secret.expose() as view:
        secret.wipe()
        assert bytes(view) == bytes(32)


def test_a_wiped_secret_does_not_pass_for_a_key_of_zeros() -> None:
    secret = SecretBytes.random(32)
    secret.wipe()
    with pytest.raises(KeyRefused) as caught, secret.expose():
        pass
    assert caught.value.code == "secret.wiped"


def test_a_stray_slice_reads_zeros_after_close_and_never_unmapped_memory(protection: str) -> None:
    secret = SecretBytes.random(32)
    with secret.expose() as view:
        stray = view[4:8]
    secret.close()
    assert bytes(stray) == bytes(4)


def test_memory_is_unmapped_when_the_last_view_is_gone(protection: str) -> None:
    secret = SecretBytes(16)
    address = ctypes.addressof(secret._buffer())
    assert _is_mapped(address)
    secret.close()
    assert not _is_mapped(address)


def _is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return True
    return False


def test_pages_are_locked_and_kept_out_of_dumps(protection: str) -> None:
    secret = SecretBytes(16)
    address = ctypes.addressof(secret._buffer())
    flags = _flags(address)
    if protection == "locked":
        assert {"lo", "dd", "wf"} <= flags
    else:
        assert {"lo", "dc"} <= flags


def _flags(address: int) -> set[str]:
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    raise AssertionError("no such mapping")


def test_a_child_cannot_use_the_secret_of_its_parent(protection: str) -> None:
    secret = SecretBytes.random(32)
    child = os.fork()
    if child == 0:
        try:
            with secret.expose():
                pass
        except KeyRefused:
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_the_descriptor_of_secret_memory_is_not_kept_open() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    secret = SecretBytes(16)
    assert set(Path("/proc/self/fd").iterdir()) == before
    secret.close()


@pytest.mark.parametrize(
    "leak",
    [
        pytest.param(str, id="str"),
        pytest.param(bytes, id="bytes"),
        pytest.param(hash, id="hash"),
        pytest.param(copy.copy, id="copy"),
        pytest.param(copy.deepcopy, id="deepcopy"),
        pytest.param(pickle.dumps, id="pickle"),
        pytest.param(lambda secret: f"{secret}", id="format"),
        pytest.param(lambda secret: secret == bytes(32), id="equality"),
    ],
)
def test_a_secret_has_no_other_form(leak: object) -> None:
    with SecretBytes.random(32) as secret, pytest.raises(TypeError):
        leak(secret)  # type: ignore[operator]  # each parameter is callable


def test_repr_shows_the_size_only() -> None:
    assert repr(SecretBytes(7)) == "<SecretBytes of 7 bytes>"


@pytest.mark.parametrize("size", [0, -1, MAX_SECRET_BYTES + 1])
def test_refuses_absurd_sizes(size: int) -> None:
    with pytest.raises(ValueError, match="a secret of"):
        SecretBytes(size)


def test_refuses_without_protected_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_map_memfd_secret", lambda length: None)
    monkeypatch.setattr(module, "_map_locked", lambda length: None)
    with pytest.raises(SecretMemoryRefused) as caught:
        SecretBytes(32)
    assert (caught.value.code, caught.value.exit_status) == ("secret.memory", 78)


@pytest.mark.parametrize("call", ["mlock", "madvise"])
def test_pages_that_cannot_be_protected_are_refused(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_map_memfd_secret", lambda length: None)
    monkeypatch.setattr(module._libc, call, lambda *_: -1)
    with pytest.raises(SecretMemoryRefused) as caught:
        SecretBytes(32)
    assert caught.value.code == "secret.memory"


def test_a_kernel_without_secret_memory_gives_locked_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._libc, "syscall", lambda *_: -1)
    assert SecretBytes(16).protection == "locked"


@pytest.mark.parametrize("step", ["size", "mapping", "fork"])
def test_secret_memory_that_fails_on_the_way_gives_locked_pages(
    step: str, protection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if protection == "locked":
        return

    def refuse(*_: object) -> None:
        raise OSError

    real_map, real_madvise = module._map, module._libc.madvise
    if step == "size":
        monkeypatch.setattr(os, "ftruncate", refuse)
    elif step == "mapping":
        monkeypatch.setattr(module, "_map", lambda size, flags, fd: None if fd >= 0 else real_map(size, flags, fd))
    else:
        monkeypatch.setattr(
            module._libc,
            "madvise",
            lambda at, size, advice: -1 if advice == module._MADV_DONTFORK else real_madvise(at, size, advice),
        )
    assert SecretBytes(16).protection == "locked"


def test_no_memory_at_all_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_map", lambda *_: None)
    with pytest.raises(SecretMemoryRefused):
        SecretBytes(16)


def test_refuses_a_kernel_that_gives_no_random_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    ctypes.set_errno(errno.ENOSYS)
    monkeypatch.setattr(module._libc, "getrandom", lambda *_: -1)
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.ENOSYS)
    with pytest.raises(SecretMemoryRefused) as caught:
        SecretBytes.random(16)
    assert caught.value.code == "secret.random"


def test_random_goes_on_after_a_signal_and_after_half_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([-1, 10, 6])
    asked: list[int] = []

    def getrandom(start: int, size: int, flags: int) -> int:
        asked.append(size)
        return next(answers)

    monkeypatch.setattr(module._libc, "getrandom", getrandom)
    monkeypatch.setattr(ctypes, "get_errno", lambda: errno.EINTR)
    SecretBytes.random(16)
    assert asked == [16, 16, 6]


def test_wipes_what_is_left_when_the_process_ends() -> None:
    # The order of exit handlers is last in, first out: this one, registered before the import, looks after the wipe.
    program = (
        "import atexit, ctypes\n"
        "def look():\n"
        "    print(bytes((ctypes.c_ubyte * 32).from_address(address)) == bytes(32), had)\n"
        "atexit.register(look)\n"
        "from provisioning import secret\n"
        "secret._map_memfd_secret = lambda length: None\n"
        "kept = secret.SecretBytes.random(32)\n"
        "address = ctypes.addressof(kept._buffer())\n"
        "had = bytes((ctypes.c_ubyte * 32).from_address(address)) != bytes(32)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]
