"""A fixed moment, for tests that must not look at a clock."""

from datetime import UTC, datetime

NOW = datetime(2026, 11, 30, 12, 0, 0, tzinfo=UTC)
