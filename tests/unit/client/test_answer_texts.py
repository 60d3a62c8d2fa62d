import hypothesis.strategies as st
from hypothesis import given

from microturn_client._answer_texts import AnswerTexts


def test_an_answer_is_cut_behind_a_token():
    answers = AnswerTexts()
    answers.add(5, ["a", "", "bä", "c"])
    answers.add(20, ["d"])
    assert (answers.text(5), answers.text(20), answers.text(6)) == ("abäc", "d", "")
    answers.cut(8)
    assert (answers.text(5), answers.text(20)) == ("abä", "")
    answers.add(9, ["later"])
    assert (answers.text(5), answers.text(9)) == ("abä", "later")
    answers.drop_before(9)
    assert (answers.text(5), answers.text(9)) == ("", "later")


ACTS = st.lists(st.one_of(st.lists(st.text(max_size=2), min_size=1, max_size=4), st.integers(0, 30)), max_size=20)


@given(ACTS)
def test_it_is_a_list_of_texts_that_is_cut(acts):
    answers, expected, end = AnswerTexts(), {}, 0
    for act in acts:
        if isinstance(act, int):
            end = min(end, act)
            answers.cut(act)
            expected = {start: texts[: end - start] for start, texts in expected.items() if start < end}
        else:
            answers.add(end + 1, act)
            expected[end + 1] = act
            end += 1 + len(act)
    for start in range(40):
        assert answers.text(start) == "".join(expected.get(start, []))
    assert answers.num_bytes >= sum(len("".join(texts).encode()) for texts in expected.values())
