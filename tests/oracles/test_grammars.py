"""Answers under grammars: valid, and those of plain transformers under the same masks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonschema import Draft202012Validator as Validator
from llguidance import LLMatcher, LLTokenizer
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from microturn.model.sampler import draw
from microturn.model.sampling_row import SamplingRow
from microturn.model.stock import untouched
from microturn.sessions.environment import next_epoch
from microturn.sessions.inputs import TextInput
from microturn.sessions.options import TurnOptions
from microturn.snapshots.directory import SnapshotDirectory
from microturn.text.model_text import ModelText
from microturn.text.session_text import SessionText
from support.driver import Driver, Recorder, asynchronous_runner, model_runner
from support.random_schemas import random_schema
from support.snapshots import saved

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"enum": ["tea", "coffee", "rain"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "likes"],
    "additionalProperties": False,
}
DATE = r"(Mon|Tue|Wed|Thu|Fri), [0-3][0-9]\.[01][0-9]\."
FORMATS = Validator.FORMAT_CHECKER
SUM = 'start: n ("+" n){1,3} "=" n\nn: /[1-9][0-9]{0,3}/'
GREEDY: dict[str, Any] = {}
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11}


@FORMATS.checks("date", raises=ValueError)
def is_date(value: object) -> bool:
    """As the contract says: 29 February is in any year."""
    return not isinstance(value, str) or (value[:4].isdecimal() and bool(date.fromisoformat(f"2000{value[4:]}")))


@pytest.fixture(scope="module")
def model_text(smollm2_dir: str) -> ModelText:
    return ModelText.from_directory(Path(smollm2_dir))


def open_driver(
    model: PreTrainedModel, model_text: ModelText, *, new_runner: Any = model_runner, **kwargs: Any
) -> Driver:
    runner = new_runner(model)
    return Driver(
        runner,
        new_codec=partial(SessionText, model_text),
        eos_ids=model_text.eos_ids,
        grammars=model_text.grammars(runner.vocab_size),
        **kwargs,
    )


# ---- valid ---------------------------------------------------------------------------------------------------------


def test_answers_under_random_schemas_are_valid(smollm2: PreTrainedModel, model_text: ModelText, full: bool) -> None:
    num_answers, rng = 1000 if full else 10, random.Random(20)
    driver = open_driver(smollm2, model_text, max_sessions=100)
    waiting = [_Asked(driver, number, random_schema(rng)) for number in reversed(range(num_answers))]
    running: list[_Asked] = []
    num_tokens = num_continued = num_done = 0
    while waiting or running:
        while waiting and len(running) < 64:
            running.append(waiting.pop())
            running[-1].go_on()
        driver.engine.step(block=True)
        for asked in [asked for asked in running if asked.has_ended()]:
            Validator(asked.schema, format_checker=FORMATS).validate(json.loads(asked.text))
            running.remove(asked)
            num_done, num_tokens = num_done + 1, num_tokens + asked.num_tokens
            num_continued += asked.num_parts > 1
            if num_done % 20 == 0:
                print(f"{num_done} valid, {num_tokens} tokens, {num_continued} in several turns", flush=True)
    driver.engine.stop()
    assert num_done == num_answers
    assert num_tokens > 10 * num_answers


class _Asked:
    """A session with one question, whose answer may take several turns."""

    def __init__(self, driver: Driver, number: int, schema: dict[str, Any]) -> None:
        self.schema = schema
        self.text = ""
        self.num_tokens = self.num_parts = 0
        self._driver = driver
        self._number = number
        self._begun: int | None = None
        self._part = Recorder()

    def go_on(self) -> None:
        """Asks for the value, or for more of it."""
        question = TextInput(f"Question {self._number}: tell me about it, as JSON.\nAnswer: ")
        options = {"json_schema": json.dumps(self.schema), "temperature": 1.0, "seed": self._number, "max_tokens": 60}
        if self._begun is None:
            self._part, _ = self._driver.post(self._number, question, start=True, **options)
        else:
            self._part, _ = self._driver.post(self._number, grammar_from=self._begun, **options)

    def has_ended(self) -> bool:
        """Whether the value is whole; where it is cut short, goes on."""
        if not self._part.is_done:
            return False
        status, num_tokens = self._part.status, len(self._part.token_ids)
        if self._begun is None:
            self._begun = status.context_len - num_tokens
        self.text, self.num_tokens = self.text + self._part.text, self.num_tokens + num_tokens
        self.num_parts += 1
        if status.finish_reason == "length":
            assert self.num_parts < 20, f"no end of {self.text} under {self.schema}"
            self.go_on()
            return False
        assert status.finish_reason == "complete", self.schema
        self._driver.post(self._number, end=True)
        return True


# ---- as plain transformers -----------------------------------------------------------------------------------------


class _Masked(LogitsProcessor):
    """Lets transformers choose what our sampler chooses of a reference's logits, under the library's own mask."""

    def __init__(self, matcher: LLMatcher, options: TurnOptions, num_before: int) -> None:
        self._matcher = matcher
        self._options = options
        self._num_seen = num_before

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert self._matcher.consume_tokens(input_ids[0, self._num_seen :].tolist())
        self._num_seen = input_ids.shape[1]
        allowed = np.frombuffer(self._matcher.compute_bitmask(), np.uint32)
        row = SamplingRow(self._options, self._options.seed or 0, self._num_seen, allowed=allowed)
        chosen = draw(scores.float(), [row]).sampled()[0].token_id
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([chosen]), 0.0)


class Plain:
    """Transformers' own `generate` under masks of the library's own tokenizer."""

    def __init__(self, model: PreTrainedModel, directory: str) -> None:
        self._model = model
        self._vocabulary = LLTokenizer(
            str(Path(directory) / "tokenizer.json"), n_vocab=model.config.vocab_size, eos_token=[2]
        )

    def answer(
        self, context: Sequence[int], kind: str, source: str, max_tokens: int, *, so_far: int = 0, **options: Any
    ) -> list[int]:
        """Ids up to the end of the value.

        Args:
            context: ids, the last `so_far` of them of the value.
        """
        matcher = LLMatcher(self._vocabulary, _written(kind, source), log_level=0)
        num_before = len(context) - so_far
        masked = LogitsProcessorList([_Masked(matcher, TurnOptions(**options), num_before)])
        given = torch.tensor([list(context)], device=self._model.device)
        with untouched(self._model), torch.inference_mode():
            output = self._model.generate(
                given,
                max_new_tokens=max_tokens,
                do_sample=False,
                logits_processor=masked,
                eos_token_id=2,
                pad_token_id=2,
            )
        ids: list[int] = output[0, len(context) :].tolist()
        # Where nothing can follow, the library lets only an end come, and we send none.
        return ids[:-1] if ids[-1] == 2 else ids


def _written(kind: str, source: str) -> str:
    match kind:
        case "json_schema":
            style: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
            return LLMatcher.grammar_from_json_schema(source, defaults=style)
        case "regex":
            return LLMatcher.grammar_from_regex(source)
        case _:
            return LLMatcher.grammar_from_lark(source)


@pytest.mark.parametrize(
    ("new_runner", "sampling"),
    [(model_runner, GREEDY), (asynchronous_runner, SAMPLED)],
    ids=["greedy, in turn", "sampled, ahead"],
)
def test_a_session_whose_grammars_change_is_that_of_plain_transformers(
    new_runner: Any,
    sampling: dict[str, Any],
    smollm2: PreTrainedModel,
    smollm2_dir: str,
    model_text: ModelText,
    tmp_path: Path,
) -> None:
    snapshots = SnapshotDirectory(tmp_path, ttl_s=3600)
    driver, elsewhere = (open_driver(smollm2, model_text, new_runner=new_runner, snapshots=snapshots) for _ in range(2))
    plain = Plain(smollm2, smollm2_dir)
    name = "talk"
    context: list[int] = []

    def turn(
        server: Driver,
        session: str,
        text: str,
        kind: str,
        source: str,
        max_tokens: int,
        so_far: int = 0,
        **options: Any,
    ) -> Recorder:
        """A turn whose answer must be the plain one; the context goes on by it."""
        said = {kind: source, "return_appended_ids": True, "max_tokens": max_tokens, **sampling, **options}
        if so_far:
            said["grammar_from"] = len(context) - so_far
        answer = server.turn(session, TextInput(text), **said)
        assert answer.status.finish_reason in ("complete", "length")
        context.extend(answer.outputs[-1].appended_ids or ())
        assert answer.token_ids == plain.answer(context, kind, source, max_tokens, so_far=so_far, **sampling)
        context.extend(answer.token_ids)
        return answer

    person = json.dumps(PERSON)
    first = turn(driver, name, "Describe Ann in JSON: ", "json_schema", person, 80, start=True)
    Validator(PERSON).validate(json.loads(first.text))
    turn(driver, name, "\nWhen do we meet? On ", "regex", DATE, 30)
    # A value is cut short, cut back, and goes on.
    cut = turn(driver, name, "\nDescribe Bob in JSON: ", "json_schema", person, 9)
    assert cut.status.finish_reason == "length"
    del context[-4:]
    whole = turn(driver, name, "", "json_schema", person, 80, 5, rewind_to=len(context))
    assert whole.status.finish_reason == "complete"
    # A branch from inside a value, under the same grammar; and one that says something else.
    at = len(context) - len(whole.token_ids)
    before = context[:]
    del context[at:]
    turn(driver, "branch", "", "json_schema", person, 80, 5, start=True, fork_of=name, rewind_to=at)
    context[:] = before
    del context[at:]
    turn(driver, "other", "\nA sum: ", "grammar", SUM, 30, start=True, fork_of=name, rewind_to=at)
    # Cut short again, saved, and taken up elsewhere inside the value.
    context[:] = before
    turn(driver, name, "\nDescribe Eve in JSON: ", "json_schema", person, 8)
    assert driver.engine.snapshots is not None
    driver.engine.snapshots.save(saved(driver, name, epoch=next_epoch()))
    last = turn(elsewhere, name, "", "json_schema", person, 80, 8, start=True, resume=True)
    assert last.status.finish_reason == "complete"
    for server in (driver, elsewhere):
        server.engine.stop()
