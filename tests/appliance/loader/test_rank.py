"""The rank process: its phases, the orders it obeys, and the abuse it survives."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from appliance import loader as loader_module
from appliance import rank as rank_module
from appliance.protocol import (
    Cancel,
    Exit,
    Load,
    ModelReady,
    Progress,
    RankFailed,
    RankStats,
    Rejected,
    Resident,
    Tokens,
    Wiped,
    Zeroize,
    encode,
)
from appliance.rank import Rank
from appliance.ring import Tally
from tests.sim.ranks import NoWatch, ProcessRank, ThreadRank, order, submit
from tests.sim.sealedmodel import SEGMENT, Sealed
from tests.sim.slots import StuckSlot


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadRank]:
    monkeypatch.setattr(rank_module, "Watch", NoWatch)
    threads = torch.get_num_threads()
    with ThreadRank() as made:
        yield made
    torch.set_num_threads(threads)


def load(rank: ThreadRank | ProcessRank, sealed: Sealed) -> tuple[Resident, ModelReady]:
    rank.control.send(order(sealed))
    rank.send_key(sealed)
    return rank.expect(Resident), rank.expect(ModelReady, rank.api)


def answer(rank: ThreadRank | ProcessRank, request: str) -> tuple[list[int], str]:
    tokens: list[int] = []
    while True:
        message = rank.expect(Tokens, rank.api)
        if message.request == request:
            tokens += message.tokens
            if message.finish:
                return tokens, message.finish


def assert_everything_is_zero(rank: Rank) -> None:
    slot = rank._slot
    assert slot is not None
    again = slot.zeroize()
    assert again.nonzero_bytes == 0
    assert slot.wipe_staging().nonzero_bytes == 0


def test_loads_and_says_what_is_resident(rank: ThreadRank, sealed: Sealed) -> None:
    resident, ready = load(rank, sealed)
    weights = sealed.weights()
    assert resident.device == "cpu"
    assert resident.weight_bytes == sum(tensor.numel() * 4 for tensor in weights.values())
    assert 0 < resident.peak_plaintext_bytes <= 8 * SEGMENT
    assert resident.peak_rss_bytes > resident.weight_bytes
    assert ready.vocabulary == weights["model.embed_tokens.weight"].shape[0]
    assert ready.max_context == 256
    assert ready.eos_ids == [2]
    assert ready.tokenizer == (sealed.source / "tokenizer.json").read_bytes()
    assert ready.tokenizer_config == (sealed.source / "tokenizer_config.json").read_bytes()
    assert ready.chat_template == b""


def test_reports_progress_up_to_the_last_byte(rank: ThreadRank, sealed: Sealed) -> None:
    rank.control.send(order(sealed))
    rank.send_key(sealed)
    last = Progress(0, 0, 0, 0)
    while not isinstance(message := rank.control.receive(), Resident):
        assert isinstance(message, Progress)
        last = message
    assert last.opened_bytes == last.total_bytes > 0


def test_the_context_is_never_longer_than_the_model_allows(rank: ThreadRank, sealed: Sealed) -> None:
    rank.control.send(order(sealed, max_context=100_000))
    rank.send_key(sealed)
    assert rank.expect(ModelReady, rank.api).max_context == 512


def test_answers_requests_with_tokens(rank: ThreadRank, sealed: Sealed) -> None:
    load(rank, sealed)
    rank.api.send(submit("a", max_tokens=4))
    rank.api.send(submit("b", prompt="something else", max_tokens=3))
    tokens, finish = answer(rank, "a")
    assert (len(tokens), finish) == (4, "length")


def test_rejects_one_request_and_goes_on(rank: ThreadRank, sealed: Sealed) -> None:
    load(rank, sealed)
    rank.api.send(submit("long", prompt="x" * 5000))
    rejected = rank.expect(Rejected, rank.api)
    assert rejected.request == "long"
    assert rejected.code.startswith("request.")
    rank.api.send(submit("short", max_tokens=2))
    assert answer(rank, "short")[1] == "length"


def test_cancels_a_request(rank: ThreadRank, sealed: Sealed) -> None:
    load(rank, sealed)
    rank.api.send(submit("a", max_tokens=200))
    rank.expect(Tokens, rank.api)
    rank.api.send(Cancel("a"))
    assert answer(rank, "a")[1] in ("cancelled", "length")


def test_sends_counters_while_serving(rank: ThreadRank, sealed: Sealed) -> None:
    load(rank, sealed)
    assert rank.expect(RankStats).running == 0


def zeroize_and_leave(rank: ThreadRank) -> Wiped:
    rank.control.send(Zeroize())
    wiped = rank.expect(Wiped)
    rank.control.send(Exit())
    return wiped


def test_zeroizes_on_order_while_serving_and_leaves_with_status_zero(rank: ThreadRank, sealed: Sealed) -> None:
    resident, _ = load(rank, sealed)
    rank.api.send(submit("a", max_tokens=100))
    rank.expect(Tokens, rank.api)
    wiped = zeroize_and_leave(rank)
    assert wiped.nonzero_bytes == 0
    assert wiped.overwritten_bytes == wiped.read_back_bytes >= resident.weight_bytes
    assert wiped.staging_bytes == resident.ring_bytes
    assert rank.join() == 0
    assert_everything_is_zero(rank.rank)


def test_stays_wiped_until_it_is_dismissed(rank: ThreadRank, sealed: Sealed) -> None:
    load(rank, sealed)
    rank.control.send(Zeroize())
    rank.expect(Wiped)
    rank.control.send(Zeroize())
    assert rank.status is None
    rank.control.send(Exit())
    assert rank.join() == 0


def test_zeroizes_on_order_before_anything_was_loaded(rank: ThreadRank) -> None:
    assert zeroize_and_leave(rank) == Wiped("none", 0, 0, 0, 0, 0.0)
    assert rank.join() == 0


def test_zeroizes_on_order_while_it_waits_for_the_key(rank: ThreadRank, sealed: Sealed) -> None:
    rank.control.send(order(sealed))
    assert zeroize_and_leave(rank).nonzero_bytes == 0
    assert rank.join() == 0


def test_zeroizes_on_order_in_the_middle_of_a_load(
    rank: ThreadRank, sealed: Sealed, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = Rank._on_progress

    def on_progress(self: Rank, plaintext: Tally, done: int, total: int) -> None:
        if self._last_progress == 0:
            rank.control.send(Zeroize())
        inner(self, plaintext, done, total)

    monkeypatch.setattr(Rank, "_on_progress", on_progress)
    rank.control.send(order(sealed))
    rank.send_key(sealed)
    first = rank.control.receive()
    assert isinstance(first, Wiped)
    assert first.nonzero_bytes == 0
    rank.control.send(Exit())
    assert rank.join() == 0
    assert_everything_is_zero(rank.rank)


def failure(rank: ThreadRank) -> RankFailed:
    """Read a failure and the wipe that must follow, and let the rank go."""
    failed = rank.expect(RankFailed)
    assert rank.expect(Wiped).nonzero_bytes == 0
    rank.control.close()
    assert rank.join() == failed.exit_status
    return failed


def test_reports_a_damaged_bundle_with_its_code_and_status(rank: ThreadRank, sealed: Sealed, tmp_path: Path) -> None:
    copy = sealed.copy(tmp_path / "bundle")
    path = sorted(copy.glob("data-*.seal"))[-1]
    path.write_bytes(bytes(path.stat().st_size))
    rank.control.send(order(sealed, bundle=str(copy)))
    rank.send_key(sealed)
    failed = failure(rank)
    assert (failed.code, failed.exit_status) == ("segment.tag", 7)
    assert_everything_is_zero(rank.rank)


@pytest.mark.parametrize(
    ("change", "code", "status"),
    [
        ({"manifest_digest": bytes(48)}, "bundle.changed", 7),
        ({"bundle": "/nonexistent"}, "bundle.directory", 7),
        ({"device": "tpu"}, "slot.name", 78),
        ({"world": 2}, "engine.devices", 8),
        ({"dtype": "int3"}, "rank.dtype", 8),
        ({"ring_bytes": 1000}, "ring.size", 78),
        ({"open_on": "device"}, "loading.open_on", 78),
        ({"kv_cache_bytes": 1}, "engine.kv.small", 8),
    ],
)
def test_reports_an_order_that_cannot_be_carried_out(
    rank: ThreadRank, sealed: Sealed, change: dict[str, object], code: str, status: int
) -> None:
    # The key first: a rank that refuses the order closes the pipe.
    rank.send_key(sealed)
    rank.control.send(order(sealed, **change))
    failed = failure(rank)
    assert (failed.code, failed.exit_status) == (code, status)


def test_reports_an_owner_key_that_is_none(rank: ThreadRank, sealed: Sealed) -> None:
    rank.control.send(order(sealed, owner_key=b"{}"))
    assert failure(rank).exit_status == 6


def test_reports_the_key_of_another_bundle(rank: ThreadRank, sealed: Sealed) -> None:
    rank.control.send(order(sealed))
    os.write(rank.key, bytes(range(32)))
    rank.close_key()
    failed = failure(rank)
    assert (failed.code, failed.exit_status) == ("bundle.key", 6)


def test_reports_an_agent_that_closes_the_pipe_without_a_key(rank: ThreadRank, sealed: Sealed) -> None:
    rank.control.send(order(sealed))
    rank.close_key()
    assert failure(rank).code == "secret.short"


def test_reports_an_unforeseen_error_by_its_type_only(
    rank: ThreadRank, sealed: Sealed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("the prompt was: tell nobody")

    monkeypatch.setattr(loader_module.placement, "place", broken)
    rank.control.send(order(sealed))
    rank.send_key(sealed)
    failed = failure(rank)
    assert (failed.code, failed.found) == ("rank.internal", "ValueError")
    assert "nobody" not in repr(failed)


def test_reports_a_device_that_fails_while_serving(
    rank: ThreadRank, sealed: Sealed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(rank_module.Engine, "step", broken)
    load(rank, sealed)
    rank.api.send(submit())
    failed = failure(rank)
    assert (failed.code, failed.exit_status) == ("device.fault", 8)
    assert_everything_is_zero(rank.rank)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\2{}", encode(submit())])
def test_a_malformed_or_misplaced_message_of_the_agent_ends_it(rank: ThreadRank, data: bytes) -> None:
    rank.control_socket.sendall(data)
    assert rank.expect(RankFailed).code.startswith("protocol.")
    rank.expect(Wiped)
    rank.control.close()
    assert rank.join() == 1


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\0\0\0\2{}", encode(Zeroize()), encode(Exit())])
def test_a_malformed_or_misplaced_message_of_the_api_ends_it_wiped(
    rank: ThreadRank, sealed: Sealed, data: bytes
) -> None:
    load(rank, sealed)
    rank.engine_socket.sendall(data)
    failed = failure(rank)
    assert failed.code in ("protocol.message", "protocol.direction")
    assert_everything_is_zero(rank.rank)


def test_a_second_order_while_serving_ends_it(rank: ThreadRank, sealed: Sealed) -> None:
    load(rank, sealed)
    rank.control.send(order(sealed))
    assert failure(rank).code == "protocol.direction"


def test_half_a_frame_of_the_api_does_not_delay_the_wipe(rank: ThreadRank, sealed: Sealed) -> None:
    load(rank, sealed)
    rank.engine_socket.sendall(encode(submit())[:-3])
    assert zeroize_and_leave(rank).nonzero_bytes == 0


def test_an_api_that_reads_nothing_does_not_delay_the_wipe(rank: ThreadRank, sealed: Sealed) -> None:
    rank.engine_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    rank.control.send(order(sealed))
    rank.send_key(sealed)
    rank.expect(Resident)
    for number in range(20):
        rank.api.send(submit(f"r{number}", max_tokens=100))
    rank.expect(RankStats)
    assert zeroize_and_leave(rank).nonzero_bytes == 0


def test_an_api_that_dies_costs_its_requests_and_nothing_else(rank: ThreadRank, sealed: Sealed) -> None:
    load(rank, sealed)
    rank.api.send(submit("a", max_tokens=200))
    rank.expect(Tokens, rank.api)
    rank.api.close()
    while rank.expect(RankStats).running:
        pass
    assert zeroize_and_leave(rank).nonzero_bytes == 0
    assert rank.join() == 0


def test_memory_that_does_not_take_the_overwrite_gives_status_nine(
    rank: ThreadRank, sealed: Sealed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_module, "open_slot", lambda _: StuckSlot(0, 1, 2, 3))
    load(rank, sealed)
    rank.rank._slot._blocks()[0][:4].fill_(9)  # type: ignore[union-attr]  # a StuckSlot
    assert zeroize_and_leave(rank).nonzero_bytes == 4
    assert rank.join() == 9


def test_a_rank_without_an_api_holds_its_part_and_obeys(sealed: Sealed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_module, "Watch", NoWatch)
    with ThreadRank() as rank:
        rank.rank._api = None
        rank.control.send(order(sealed))
        rank.send_key(sealed)
        rank.expect(Resident)
        assert zeroize_and_leave(rank).nonzero_bytes == 0
        assert rank.join() == 0


# --- as a process ---------------------------------------------------------------------------------------------------


def test_the_process_ignores_signals_serves_and_leaves_nothing_when_told(sealed: Sealed) -> None:
    with ProcessRank() as rank:
        load(rank, sealed)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            rank.process.send_signal(number)
        status = Path(f"/proc/{rank.process.pid}/status").read_text()
        ignored = int(next(line.split()[1] for line in status.splitlines() if line.startswith("SigIgn:")), 16)
        assert all(ignored >> (number - 1) & 1 for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
        # /proc of a process that cannot be dumped belongs to root, and its core limit is zero.
        limits = Path(f"/proc/{rank.process.pid}/limits").read_text()
        assert next(line.split()[4:6] for line in limits.splitlines() if line.startswith("Max core")) == ["0", "0"]
        rank.api.send(submit("a", max_tokens=3))
        assert answer(rank, "a")[1] == "length"
        rank.control.send(Zeroize())
        assert rank.expect(Wiped).nonzero_bytes == 0
        rank.control.send(Exit())
        assert rank.wait() == 0


@pytest.mark.parametrize("phase", ["waiting", "without a key", "serving", "computing"])
def test_the_process_ends_within_a_second_when_the_agent_dies(sealed: Sealed, phase: str) -> None:
    with ProcessRank() as rank:
        if phase == "waiting":
            rank.control.send(Load("x", b"", b"", "cpu", 0, 1, "auto", 1, 1, 1, "host", 1, 1, 1, 1))
            rank.expect(Wiped)  # so that it is known to have started
        elif phase == "without a key":
            rank.control.send(order(sealed))
        else:
            load(rank, sealed)
            if phase == "computing":
                rank.api.send(submit("a", max_tokens=200))
                rank.expect(Tokens, rank.api)
        begin = time.monotonic()
        rank.control.close()
        rank.wait()
        # Starting the interpreter may still be under way in one phase; a loaded machine needs some slack.
        assert time.monotonic() - begin < (60 if phase == "without a key" else 5)


WATCH = """
import socket, sys, threading, time
from pathlib import Path
from appliance.watch import Watch
ours = socket.socket(fileno=int(sys.argv[1]))
def at_last():
    sys.stdout.write("overwritten")
    sys.stdout.flush()
with Watch(ours.fileno(), at_last=at_last, status=69):
    sys.stdout.write("busy,")
    sys.stdout.flush()
    threading.Event().wait()
"""


def test_the_watch_ends_a_process_that_hangs_after_its_agent_died() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", WATCH, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdout=subprocess.PIPE,
            env=dict(os.environ) | {"PYTHONPATH": str(Path(rank_module.__file__).parents[1])},
        )
    with process, ours:
        assert process.stdout is not None
        assert process.stdout.read(5) == b"busy,"
        ours.close()
        assert process.stdout.read() == b"overwritten"
        assert process.wait(30) == 69


def test_the_watch_leaves_a_process_alone_whose_agent_lives() -> None:
    called: list[Callable[[], None]] = []
    ours, theirs = socket.socketpair()
    with ours, theirs, rank_module.Watch(ours.fileno(), at_last=lambda: called.append(print), status=1):
        pass
    assert called == []
