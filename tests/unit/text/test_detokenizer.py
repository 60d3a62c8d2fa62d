import codecs

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from microturn.text.detokenizer import Detokenizer, OutputState
from support.text_edge import TextEdge

few = settings(max_examples=80, deadline=None)


def decode(decoder: Detokenizer, ids: list[int], state: OutputState | None = None) -> tuple[str, OutputState]:
    text, state = "", state or OutputState()
    for token_id in ids:
        piece, state = decoder.accept(state, token_id)
        text += piece.text
    return text, state


def rest(edge: TextEdge, state: OutputState) -> str:
    """What a decoder of all ids makes of what has not come out: text before half a character, and that half."""
    detokenizer = edge.model.detokenizer
    return detokenizer.end(state)[0] + detokenizer._replace(state.partial_char)


def whole_text(edge: TextEdge, ids: list[int]) -> str:
    return edge.oracle.backend_tokenizer.decode(ids, skip_special_tokens=True)


def is_valid_row(edge: TextEdge, ids: list[int]) -> bool:
    """Whether single-byte tokens in a row are valid together; where they aren't, see the decoder's docstring."""
    tokens = [token or "" for token in edge.oracle.convert_ids_to_tokens(ids, skip_special_tokens=True)]
    rows = "".join(token[3:5] if token.startswith("<0x") else " " for token in tokens).split()
    try:
        for row in rows:
            bytes.fromhex(row).decode()
    except UnicodeDecodeError:
        return False
    return True


@few
@given(data=st.data())
def test_random_ids_decode_to_the_text_of_all_of_them(edge: TextEdge, data: st.DataObject) -> None:
    vocab_size = edge.model.vocab_size
    ids = data.draw(st.lists(st.integers(0, min(600, vocab_size - 1)) | st.integers(0, vocab_size + 9), max_size=20))
    text, state = decode(edge.model.detokenizer, ids)
    if is_valid_row(edge, ids):
        assert text + rest(edge, state) == whole_text(edge, ids)


@few
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_text_comes_back_character_by_character(edge: TextEdge, text: str) -> None:
    ids = edge.model.encoder.encode(text, begins=True)
    pieces, state = [], OutputState()
    for token_id in ids:
        piece, state = edge.model.detokenizer.accept(state, token_id)
        pieces.append(piece.text)
    assert "".join(pieces) == whole_text(edge, ids)
    assert state.partial_char == b""


def test_special_tokens_are_text_where_they_are_asked_for_and_change_nothing_else(edge: TextEdge) -> None:
    detokenizer, oracle = edge.model.detokenizer, edge.oracle
    words = edge.model.encoder.encode("hello there", begins=True)
    special = [i for i, token in oracle.added_tokens_decoder.items() if token.special and i not in edge.model.eos_ids]
    ends = sorted(edge.model.eos_ids)
    assert special
    ids = [*special, *words, *special, *ends]
    shown, state = decode(detokenizer, ids, detokenizer.begin(OutputState(), (), shows_special=True))
    plain, plain_state = decode(detokenizer, ids)
    spelled = "".join(oracle.convert_ids_to_tokens(special))
    assert shown == spelled + plain + spelled
    assert detokenizer.end(state)[1] == plain_state


def test_a_stop_string_may_be_a_special_token_that_is_shown(load_edge) -> None:
    edge = load_edge("byte_level")
    (head,) = edge.oracle.convert_tokens_to_ids(["<|head|>"])
    state = edge.model.detokenizer.begin(OutputState(), ("<|head|>",), shows_special=True)
    piece, _ = edge.model.detokenizer.accept(state, head)
    assert (piece.text, piece.stop) == ("", "<|head|>")


def test_no_half_character_comes_out(load_edge) -> None:
    edge = load_edge("smollm2")
    ids = edge.oracle("👩‍👩‍👧").input_ids
    pieces = []
    state = OutputState()
    for token_id in ids:
        piece, state = edge.model.detokenizer.accept(state, token_id)
        pieces.append(piece.text)
    assert len(ids) > 5
    assert all(len(piece) <= 1 and piece != "\ufffd" for piece in pieces)
    assert "".join(pieces) == "👩‍👩‍👧"


def test_text_before_half_a_character_comes_with_the_rest_of_it_or_at_the_end(load_edge) -> None:
    """Where text has come an answer may be cut: half a character that nobody was told stayed in the context there."""
    edge = load_edge("smollm2")
    great, half, *others = edge.model.encoder.encode("Great 👍!", begins=True)
    text_bytes = edge.model.detokenizer._vocabulary.text_bytes
    assert text_bytes(half).startswith(b" \xf0"), "text, and half a character"
    detokenizer, pieces, states = edge.model.detokenizer, [], [OutputState()]
    for token_id in (great, half, *others):
        piece, state = detokenizer.accept(states[-1], token_id)
        pieces.append(piece.text)
        states.append(state)
    assert pieces == ["Great", "", *[""] * (len(others) - 2), " 👍", "!"]
    assert detokenizer.end(states[2])[0] == " "
    told, state = decode(detokenizer, others, detokenizer.end(states[2])[1])
    assert (told, state) == ("👍!", states[-1])


def test_a_stop_string_before_half_a_character_ends_at_once(load_edge) -> None:
    edge = load_edge("smollm2")
    great, half, *_ = edge.model.encoder.encode("Great 👍!", begins=True)
    detokenizer = edge.model.detokenizer
    _, state = detokenizer.accept(detokenizer.begin(OutputState(), (" ",), shows_special=False), great)
    piece, _ = detokenizer.accept(state, half)
    assert (piece.text, piece.stop) == ("", " ")
    _, state = detokenizer.accept(detokenizer.begin(OutputState(), ("t 👍",), shows_special=False), great)
    piece, state = detokenizer.accept(state, half)
    assert (piece.text, detokenizer.end(state)[0]) == ("", "t ")


@pytest.mark.parametrize(
    ("tokens", "text"),
    [
        (["<0xE4>", "<0xBD>", "<0xA0>"], "你"),
        (["<0xE4>", "<0xBD>", "t"], "\ufffd\ufffdt"),
        (["<0xFF>", "<0xFE>"], "\ufffd\ufffd"),
        (["<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>"], "你\ufffd"),  # the tokenizer's own: four replaced, one of them sent
    ],
)
def test_single_byte_tokens(load_edge, tokens: list[str], text: str) -> None:
    edge = load_edge("gemma3")
    pieces, state = decode(edge.model.detokenizer, edge.oracle.convert_tokens_to_ids(tokens))
    assert pieces == text
    assert state.partial_char == b""


def test_python_and_the_tokenizers_library_replace_the_same_bytes(load_edge) -> None:
    """Byte-level text that is not UTF-8: overlong, surrogates, beyond Unicode, cut short."""
    edge = load_edge("byte_level")
    to_id = {edge.model.detokenizer._vocabulary.text_bytes(i): i for i in range(edge.model.vocab_size)}
    for data in (
        b"\xc0\x80a",
        b"\xed\xa0\x80",
        b"\xf4\x90\x80\x80",
        b"\xe4\xbd",
        b"\xf0\x9f\x91 a",
        b"\x80\x80",
        b"\xed\xa0",
    ):
        ids = [to_id[bytes([byte])] for byte in data]
        text, state = decode(edge.model.detokenizer, ids)
        assert text + rest(edge, state) == whole_text(edge, ids)
        assert whole_text(edge, ids) == codecs.decode(data, "utf-8", "replace")


def test_special_tokens_have_no_text(edge: TextEdge) -> None:
    special = next(iter(edge.model.encoder.special_tokens))
    state = OutputState()
    piece, after = edge.model.detokenizer.accept(state, special.id)
    assert (piece.text, piece.stop, after) == ("", None, state)


def test_the_first_text_loses_the_space_that_its_decoder_drops_and_text_that_goes_on_keeps_it(load_edge) -> None:
    edge = load_edge("sentence_piece")
    (the, *_) = edge.model.encoder.encode("the", begins=True)
    text, state = decode(edge.model.detokenizer, [the])
    assert not text.startswith(" ")
    assert decode(edge.model.detokenizer, [the], edge.model.detokenizer.end(state)[1])[0] == f" {text}"
    assert decode(edge.model.detokenizer, [the], edge.model.detokenizer.interrupt(state))[0] == text


@few
@given(data=st.data())
def test_stop_strings_are_found_wherever_tokens_cut_them(edge: TextEdge, data: st.DataObject) -> None:
    text = data.draw(st.text("stop: é世\n", max_size=30))
    stops = data.draw(st.lists(st.text("stop: é世\n", min_size=1, max_size=4), min_size=1, max_size=3))
    ids = edge.model.encoder.encode(text, begins=True)
    told = whole_text(edge, ids)
    context = edge.open()
    ends = [(told.find(stop) + len(stop), told.find(stop)) for stop in stops if stop in told]
    _, start = min(ends, default=(0, len(told)))
    assert context.generate(ids, stop=stops) == told[:start]
