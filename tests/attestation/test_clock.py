from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attestation.clock import SystemClock, format_time, parse_time
from attestation.errors import FormatError


@given(st.datetimes(datetime(1000, 1, 1), datetime(9999, 12, 31)))  # noqa: DTZ001 - hypothesis takes naive bounds
def test_times_read_back_to_the_second(at: datetime) -> None:
    whole = at.replace(microsecond=0, tzinfo=UTC)
    assert parse_time(format_time(whole)) == whole


@given(st.text(max_size=24))
def test_any_text_gives_a_time_or_a_format_error(text: str) -> None:
    try:
        at = parse_time(text)
    except FormatError:
        return
    assert format_time(at) == text


@pytest.mark.parametrize(
    "text",
    [
        "2026-11-30T12:00:00",
        "2026-11-30T12:00:00+00:00",
        "2026-11-30T12:00:00.5Z",
        "2026-11-30 12:00:00Z",
        "2026-11-30T12:00:0Z",
        "2026-1-30T12:00:00Z",
        "2026-02-30T12:00:00Z",
        "\uff12026-11-30T12:00:00Z",
        "999-11-30T12:00:00Z",
        "",
    ],
)
def test_refuses_other_forms_of_time(text: str) -> None:
    with pytest.raises(FormatError) as caught:
        parse_time(text)
    assert caught.value.code == "time.form"


def test_other_zones_are_written_in_utc() -> None:
    assert format_time(datetime(2026, 11, 30, 1, tzinfo=timezone(timedelta(hours=2)))) == "2026-11-29T23:00:00Z"


def test_now_is_never_below_a_seen_issue_time() -> None:
    clock = SystemClock()
    seen = datetime(2300, 1, 1, tzinfo=UTC)
    clock.raise_floor(seen)
    clock.raise_floor(datetime(1990, 1, 1, tzinfo=UTC))
    assert clock.now() == seen


def test_now_is_whole_seconds_in_utc() -> None:
    now = SystemClock().now()
    assert now.microsecond == 0
    assert now.utcoffset() == timedelta(0)


def test_elapsed_time_does_not_go_back() -> None:
    clock = SystemClock()
    first = clock.monotonic()
    assert clock.monotonic() >= first
