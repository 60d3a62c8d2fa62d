import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from microturn.errors import InvalidArgument
from microturn.text.encoder import TextEncoder
from microturn.text.vocabulary import Vocabulary
from support import tiny_tokenizers as tiny
from support.text_edge import TextEdge


def encoder_of(tokenizer: Tokenizer) -> TextEncoder:
    return TextEncoder(tokenizer, Vocabulary(tokenizer))


def test_text_that_continues_gets_no_space_in_front(edge: TextEdge) -> None:
    encoder = edge.model.encoder
    ids = encoder.encode("one", begins=True) + encoder.encode("two", begins=False)
    assert edge.oracle.backend_tokenizer.decode(ids).strip() == "onetwo"


def test_text_after_a_special_token_is_what_the_tokenizer_makes_of_it(edge: TextEdge) -> None:
    special = next(token for token in edge.model.encoder.special_tokens if not token.eats_space_after)
    begins = edge.model.encoder.begins_anew_after(special.id)
    ids = [special.id, *edge.model.encoder.encode("hello there", begins=begins)]
    assert ids == edge.oracle(f"{special.text}hello there", add_special_tokens=False).input_ids
    assert not edge.model.encoder.begins_anew_after(None)
    assert not edge.model.encoder.begins_anew_after(ids[-1])


@pytest.mark.parametrize(("name", "bos"), [("smollm2", []), ("gemma3", ["<bos>"]), ("byte_level", ["<s>"])])
def test_bos_is_what_the_tokenizer_puts_in_front(load_edge, name: str, bos: list[str]) -> None:
    edge = load_edge(name)
    assert edge.oracle.convert_ids_to_tokens(list(edge.model.encoder.bos_ids)) == bos


def test_no_spelling_of_a_special_token_becomes_that_token(edge: TextEdge) -> None:
    special_tokens = edge.model.encoder.special_tokens
    text = "".join(token.text for token in special_tokens)
    unknown = {token.id for token in special_tokens if token.text == "<unk>"}
    assert special_tokens.ids.isdisjoint(set(edge.model.encoder.encode(text, begins=True)) - unknown)


def test_a_vocabulary_that_merges_the_spelling_of_a_special_token_is_kept_from_it() -> None:
    merges = [("<", "s"), ("<s", ">")]
    vocab = {token: number for number, token in enumerate(["<", "s", ">", "<s", "<s>", "a", " "])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    encoder = encoder_of(tokenizer)
    assert tokenizer.encode("a<s>").tokens == ["a", "<s>"]
    assert [tokenizer.id_to_token(i) for i in encoder.encode("a<s>a", begins=True)] == ["a", "<", "s", ">", "a"]


def test_truncation_and_padding_of_the_file_are_off() -> None:
    tokenizer = tiny.byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert len(encoder_of(tokenizer).encode("user and assistant and system and tool", begins=True)) > 4


@pytest.mark.parametrize("scheme", ["first", "always"])
def test_a_space_in_front_of_every_text_can_be_taken_away(scheme: str) -> None:
    tokenizer = tiny.metaspace()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme=scheme)])
    encoder = encoder_of(tokenizer)
    assert encoder.encode(" the", begins=False) == encoder.encode("the", begins=True)
    assert encoder.encode("the", begins=False) != encoder.encode("the", begins=True)


def test_a_prefix_that_is_not_understood_is_refused() -> None:
    tokenizer = tiny.byte_level()
    tokenizer.normalizer = normalizers.Replace("a", "xa")
    with pytest.raises(InvalidArgument, match="puts something in front of every text"):
        encoder_of(tokenizer)


def test_text_that_is_much_too_long_is_found_out_early(edge: TextEdge) -> None:
    encoder = edge.model.encoder
    assert 1000 < encoder.least_num_ids("hello there, " * 1_000_000, enough=1000) < 10_000_000
    assert encoder.least_num_ids("hello there, " * 200, enough=100) > 100
    assert encoder.least_num_ids("", enough=0) == 0


@pytest.mark.parametrize("enough", [None, 100, 100_000])
def test_the_least_number_of_ids_is_not_more_than_there_are(edge: TextEdge, enough: int | None) -> None:
    """Counting in windows tears words, and special tokens may be spelled out or not."""
    encoder = edge.model.encoder
    special = next(iter(encoder.special_tokens)).text
    for text in ("hello there, " * 2000, "👩‍👩‍👧字" * 3000, " " * 20_000, "ไทยก็ดี" * 2000, special * 2000):
        context = edge.open()
        context.write(text, parse_special=True, flush=True)
        assert encoder.least_num_ids(text, enough) <= len(context.ids)
