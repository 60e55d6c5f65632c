"""Tokens to text: whole characters only, and no prefix of a stop string."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.api.text import Answer, IncrementalText, StopStrings
from tests.sim import chat_model

CHARACTERS = "ab é€😀X\n"


def decode(ids: list[int]) -> str:
    text: str = chat_model.tokenizer().decode(ids, skip_special_tokens=True)
    return text


def test_shows_no_part_of_a_character_that_spans_tokens() -> None:
    ids = chat_model.ids("😀")
    assert len(ids) == 4
    text = IncrementalText(decode)
    assert [text.feed([token]) for token in ids] == ["", "", "", "😀"]


def test_shows_an_unfinished_character_as_replacement_at_the_end() -> None:
    text = IncrementalText(decode)
    assert text.feed(chat_model.ids("a😀")[:-1]) == "a"
    assert text.finish() == "\ufffd"


def test_gives_up_on_bytes_that_never_become_a_character() -> None:
    broken = chat_model.ids("😀")[:1]
    text = IncrementalText(decode)
    assert text.feed(broken * 64) == "\ufffd" * 64


def test_tells_a_replacement_character_of_the_model_from_an_incomplete_one() -> None:
    text = IncrementalText(decode)
    pieces = [text.feed([token]) for token in chat_model.ids("\ufffd\ufffd€")]
    assert "".join(pieces) == "\ufffd\ufffd€"


@given(st.text(CHARACTERS, max_size=40))
def test_pieces_join_to_the_whole_text(whole: str) -> None:
    text = IncrementalText(decode)
    pieces = [text.feed([token]) for token in chat_model.ids(whole)]
    assert "".join(pieces) + text.finish() == whole


@pytest.mark.parametrize(
    ("stops", "pieces", "shown"),
    [
        (["END"], ["hello E", "N", "D more"], "hello "),
        (["END"], ["hello E", "NX"], "hello ENX"),
        (["b", "abc"], ["a", "b", "c"], "a"),
        (["abc", "c"], ["abc"], ""),
        (["\n\n"], ["one\n", "two\n", "\nthree"], "one\ntwo"),
        (["aab"], ["aaab"], "a"),
    ],
    ids=["split", "almost", "first to complete", "longer on a tie", "newlines", "overlap"],
)
def test_stop_string_ends_the_text(stops: list[str], pieces: list[str], shown: str) -> None:
    text = StopStrings(stops)
    assert "".join(map(text.feed, pieces)) + text.finish() == shown


def test_prefix_of_a_stop_string_is_held_back_until_it_is_none() -> None:
    text = StopStrings(["</answer>"])
    assert text.feed("yes</ans") == "yes"
    assert text.feed("!") == "</ans!"


def test_nothing_is_shown_after_a_stop_string() -> None:
    text = StopStrings(["."])
    assert text.feed("a.b") == "a"
    assert (text.feed("c"), text.finish()) == ("", "")


@given(
    st.text("ab", max_size=30),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.lists(st.integers(1, 7), min_size=1, max_size=30),
)
def test_how_text_is_cut_into_pieces_does_not_matter(whole: str, stops: list[str], sizes: list[int]) -> None:
    at_once = StopStrings(stops)
    expected = at_once.feed(whole) + at_once.finish()
    piecewise = StopStrings(stops)
    shown, at = "", 0
    for size in sizes * 30:
        shown += piecewise.feed(whole[at : at + size])
        at += size
    assert shown + piecewise.finish() == expected
    assert not any(stop in expected for stop in stops)


def test_end_token_has_no_text_even_if_the_tokenizer_does_not_call_it_special() -> None:
    answer = Answer(decode, stops=[], end_ids=chat_model.ids("!"))
    assert answer.feed(chat_model.ids("yes!"), "stop") == ("yes", "stop")


def test_end_token_is_counted() -> None:
    answer = Answer(decode, stops=[], end_ids=[chat_model.end_id()])
    answer.feed([*chat_model.ids("a"), chat_model.end_id()], "stop")
    assert answer.tokens == 2


def test_held_back_text_is_shown_when_the_length_ends_the_answer() -> None:
    answer = Answer(decode, stops=["xyz"], end_ids=[])
    assert answer.feed(chat_model.ids("abxy"), "length") == ("abxy", "length")


def test_stop_string_in_the_last_tokens_counts_as_stop() -> None:
    answer = Answer(decode, stops=["xy"], end_ids=[])
    assert answer.feed(chat_model.ids("abxy"), "length") == ("ab", "stop")
