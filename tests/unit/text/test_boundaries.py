import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from microturn.text.boundaries import Boundaries, find_boundaries
from support.text_edge import TextEdge


@pytest.fixture
def plain() -> Tokenizer:
    return Tokenizer(models.BPE())


def found(vocabulary: str, tokenizer: Tokenizer) -> Boundaries:
    return find_boundaries([token.encode() for token in vocabulary.split("|")], tokenizer, tokenizer)


def test_the_last_cut_is_between_a_word_and_a_space() -> None:
    boundaries = Boundaries({" ": (), "，": (r"\)",)})
    assert boundaries.last("") == 0
    assert boundaries.last(" hello") == 0
    assert boundaries.last("hello there") == 5
    assert boundaries.last("hello \n  ") == 5
    assert boundaries.last("hello\n there") == 0  # the line break and the space may be one token
    assert boundaries.last("你好，世界") == 2
    assert boundaries.last("(你好)，世界") == 0


def test_a_tokenizer_may_have_no_cut_at_all() -> None:
    assert Boundaries({}).last("hello there") == 0


def test_no_cut_where_a_token_of_the_vocabulary_could_lie(plain: Tokenizer) -> None:
    boundaries = found("a|>| b|> <", plain)
    assert boundaries.last("a b") == 1
    assert boundaries.last("> b") == 0


def test_no_cut_where_a_token_begins_inside_a_character(plain: Tokenizer) -> None:
    boundaries = find_boundaries(["字".encode()[1:] + b" ", b"a"], plain, plain)
    assert " " not in boundaries.openers
    assert "，" in boundaries.openers


def test_no_cut_where_a_token_ends_inside_the_character_behind_it(plain: Tokenizer) -> None:
    boundaries = find_boundaries([b"a" + "，".encode()[:1]], plain, plain)
    assert boundaries.last("a，") == 0
    assert boundaries.last("b，") == 1


def test_no_cut_after_characters_that_a_regular_expression_joins_with_what_follows(plain: Tokenizer) -> None:
    """GPT-4's expression takes a comma with the letters behind it, but not when a mark is in front of both: found by
    the property of the session's text, when a cut had made '|>，世界' into other pieces."""
    expression = Regex(r"[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")
    plain.pre_tokenizer = pre_tokenizers.Split(expression, behavior="isolated")
    boundaries = found("a", plain)
    assert boundaries.last("|>，世界") == 0
    assert boundaries.last("好，世界") == 1


def test_a_character_stands_for_its_class(plain: Tokenizer) -> None:
    """A cut that is wrong after one letter is made after none, but after other characters."""
    plain.pre_tokenizer = pre_tokenizers.Split(Regex(r"i(?=tЖ )"), behavior="isolated")
    boundaries = found("a", plain)
    assert boundaries.last("word next") == 0
    assert boundaries.last("word, next") == 5
    assert boundaries.last("слово… next") == 6


def test_the_mark_that_stands_for_a_space_is_no_visible_character(load_edge) -> None:
    """In SentencePiece's spelling a text with that mark is one with a space, and spaces in a row may be one token."""
    assert load_edge("gemma3").model.encoder.boundaries.last("so▁ the") == 0
    assert load_edge("smollm2").model.encoder.boundaries.last("so▁ the") == 3


def test_no_cut_before_a_character_that_the_model_does_not_know(load_edge) -> None:
    """Unknown characters in a row are one token."""
    boundaries = load_edge("metaspace").model.encoder.boundaries
    assert boundaries.last("好、") == 0
    assert boundaries.last("们，") == 1


def test_words_of_scripts_that_end_in_marks_are_cut(edge: TextEdge) -> None:
    if " " in edge.model.encoder.boundaries.openers:
        assert edge.model.encoder.boundaries.last("नमस्ते दुनिया") == len("नमस्ते")
        assert edge.model.encoder.boundaries.last("👍 ok") == 1


@settings(max_examples=80, deadline=None)
@given(
    text=st.lists(
        st.sampled_from(
            ["hello", " ", "  ", "\n", "the", "'s", ".", ">", "</", "，", "。", "好", "12", "é", "\u0301", "👍"]
        )
        | st.characters(exclude_categories=["Cs"]),
        max_size=12,
    ).map("".join)
)
def test_the_tokens_of_both_sides_are_those_of_the_whole(edge: TextEdge, text: str) -> None:
    encoder = edge.model.encoder
    cut = encoder.boundaries.last(text)
    while cut:
        halves = encoder.encode(text[:cut], begins=True) + encoder.encode(text[cut:], begins=False)
        assert halves == encoder.encode(text, begins=True)
        cut = encoder.boundaries.last(text[:cut])


def test_a_vocabulary_that_is_not_asked_is_noticed(load_edge) -> None:
    """A planted mistake: cuts before every space, in a model with tokens that go across words."""
    encoder = load_edge("crossing").model.encoder
    text = "hello there, how are you"
    cut = Boundaries({" ": ()}).last("hello there,")
    halves = encoder.encode(text[:cut], begins=True) + encoder.encode(text[cut:], begins=False)
    assert halves != encoder.encode(text, begins=True)
