from tokenizers import AddedToken, Tokenizer

from microturn.text.vocabulary import Vocabulary
from support import tiny_tokenizers as tiny


def test_byte_level_tokens_may_be_parts_of_characters() -> None:
    tokenizer = tiny.byte_level()
    vocabulary = Vocabulary(tokenizer)
    ids = tokenizer.encode("ไ the\n", add_special_tokens=False).ids
    assert b"".join(map(vocabulary.text_bytes, ids)) == "ไ the\n".encode()
    assert vocabulary.text_bytes(ids[0]) == "ไ".encode()[:1]
    assert not vocabulary.has_byte_fallback


def test_an_added_token_outside_of_the_byte_level_spelling_is_plain_text() -> None:
    tokenizer = tiny.byte_level()
    tokenizer.add_tokens([AddedToken("<｜br｜>", special=False)])
    assert Vocabulary(tokenizer).text_bytes(tokenizer.token_to_id("<｜br｜>")) == "<｜br｜>".encode()


def test_sentence_piece_tokens_have_spaces_but_for_the_first() -> None:
    tokenizer = tiny.sentence_piece()
    vocabulary = Vocabulary(tokenizer)
    the = tokenizer.encode("the", add_special_tokens=False).ids[0]
    assert vocabulary.text_bytes(the).startswith(b" ")
    assert vocabulary.first_text_bytes(the) == vocabulary.text_bytes(the)[1:]
    assert vocabulary.text_bytes(tokenizer.token_to_id("<0xE4>")) == b"\xe4"
    assert vocabulary.text_bytes(tokenizer.token_to_id("<0x41>")) == b"A"
    assert vocabulary.has_byte_fallback


def test_word_piece_tokens_are_learnt_from_the_decoder() -> None:
    tokenizer = tiny.word_piece()
    vocabulary = Vocabulary(tokenizer)
    fox, *_ = tokenizer.encode("the").ids
    assert (vocabulary.first_text_bytes(fox), vocabulary.text_bytes(fox)) == (b"the", b" the")


def test_special_and_unknown_ids_have_no_text() -> None:
    tokenizer = tiny.byte_level()
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.text_bytes(tokenizer.token_to_id("<|end|>")) == b""
    assert vocabulary.first_text_bytes(10**6) == b""


def test_the_vocabulary_as_text() -> None:
    for make, expected in ((tiny.byte_level, b" the"), (tiny.sentence_piece, b" the"), (tiny.word_piece, b"the")):
        tokens = set(Vocabulary(make()).mergeable_bytes())
        assert expected in tokens


def test_a_token_that_eats_the_space_behind_it_has_that_space() -> None:
    tokenizer: Tokenizer = tiny.byte_level()
    tokenizer.add_tokens([AddedToken("<br>", special=False, rstrip=True), AddedToken("<hr>", special=False)])
    tokens = set(Vocabulary(tokenizer).mergeable_bytes())
    assert b"<br> " in tokens
    assert b"<hr>" in tokens
