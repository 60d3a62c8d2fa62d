from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from microturn.text.special_tokens import SpecialTokens
from support.text_edge import TextEdge


def special_tokens(*texts: str) -> SpecialTokens:
    return SpecialTokens({number: AddedToken(text, special=True) for number, text in enumerate(texts)})


def parse(tokens: SpecialTokens, text: str, *, is_complete: bool = True) -> list[str | int]:
    parsed = tokens.parse(text, is_complete=is_complete)
    parts = [part for plain, token in parsed.parts for part in (plain, token.id)]
    return [part for part in (*parts, parsed.rest, parsed.undecided) if part != ""]


def test_the_leftmost_and_longest_token_is_taken() -> None:
    assert parse(special_tokens("<a>", "<a>b", "a>b"), "x<a>bc<a>") == ["x", 1, "c", 0]


def test_text_may_end_inside_a_token() -> None:
    tokens = special_tokens("<|end|>", "<|end")
    assert parse(tokens, "x <|en", is_complete=False) == ["x ", "<|en"]
    assert parse(tokens, "x <|end", is_complete=False) == ["x ", "<|end"]
    assert parse(tokens, "x <|end") == ["x ", 1]


def test_what_looks_like_a_beginning_inside_a_token_is_not_one() -> None:
    assert parse(special_tokens("<a>", ">>"), "<a>", is_complete=False) == [0]
    assert parse(special_tokens("<a>", ">>"), "<a>>", is_complete=False) == [0, ">"]


def test_tokens_that_are_not_special_stay_text() -> None:
    tokens = SpecialTokens({7: AddedToken("<br>", special=False), 8: AddedToken("", special=True)})
    assert parse(tokens, "a<br>b", is_complete=False) == ["a<br>b"]
    assert tokens.ids == {8} - {8}


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_wherever_the_text_is_cut_the_tokens_are_those_of_the_whole(edge: TextEdge, data: st.DataObject) -> None:
    """Parsed text in chunks, through a session: what the model's own tokenizer makes of all of it."""
    special = [token.text for token in edge.model.encoder.special_tokens if token.text not in ("<s>", "<bos>")][:12]
    begun = [text[:4] for text in special] + [text[2:] for text in special]
    chunks = data.draw(st.lists(st.sampled_from([*special, *begun, "hello", " the", " ", "\n", "."]), max_size=8))
    context = edge.open()
    text = "".join(chunks)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        context.write(text[start:end], parse_special=True)
    context.make_way()
    assert context.ids == (edge.oracle(text).input_ids if text else [])
