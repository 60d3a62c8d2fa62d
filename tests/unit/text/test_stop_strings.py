import pytest
from hypothesis import given
from hypothesis import strategies as st

from microturn.errors import InvalidArgument
from microturn.text.codec import Piece
from microturn.text.stop_strings import StopStrings, stop_strings


def scan_all(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, str | None]:
    """Text before the stop, and the stop; text that is withheld at the end comes out."""
    text, withheld = "", ""
    for piece in pieces:
        scanned, withheld = StopStrings(stops).scan(withheld + piece)
        text += scanned.text
        if scanned.stop is not None:
            return text, scanned.stop
    return text + withheld, None


def test_text_that_may_begin_a_stop_string_is_withheld() -> None:
    stops = StopStrings(("User:", "\n\n"))
    assert stops.scan("hello Us") == (Piece("hello "), "Us")
    assert stops.scan("User") == (Piece(""), "User")
    assert stops.scan("Users") == (Piece("Users"), "")
    assert stops.scan("hello User: hi") == (Piece("hello ", "User:"), "")


def test_the_string_that_is_complete_first_stops() -> None:
    assert StopStrings(("abcd", "bc")).scan("xabcd") == (Piece("xa", "bc"), "")
    assert StopStrings(("cd", "bcd", "x")).scan("abcdx") == (Piece("a", "bcd"), "")


def test_without_stop_strings_nothing_is_withheld() -> None:
    assert StopStrings(()).scan("abc") == (Piece("abc"), "")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        stop_strings(("a", ""))


stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4).map(tuple)


@given(stops=stop_lists, pieces=st.lists(st.text("abc\n", max_size=4), max_size=8))
def test_the_result_does_not_depend_on_how_the_text_is_cut(stops: tuple[str, ...], pieces: list[str]) -> None:
    text = "".join(pieces)
    ends = [(text.find(stop) + len(stop), text.find(stop), stop) for stop in stops if stop in text]
    _, start, stop = min(ends, default=(0, len(text), None))
    assert scan_all(stops, pieces) == (text[:start], stop)
    assert scan_all(stops, list(text)) == (text[:start], stop)
