"""What a grammar costs an answer on the engine's thread: following it, and choosing under its mask.

Answers are random tokens of those that are allowed, so that values are longer and wilder than a model's. Both times are
processor time of one thread for each token; beside the choice under a mask stands one of the same logits without.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from load_tests.bench.results import percentile, print_table, write_result
from microturn.model.sampler import draw
from microturn.model.sampling_row import SamplingRow
from microturn.sessions.options import TurnOptions
from microturn.text.grammar import Grammars
from microturn.text.grammar_source import GrammarSource
from microturn.text.model_text import ModelText
from microturn.zoo.store import resolve_model

_LINE = {"type": "string", "maxLength": 40}
_ORDER = {
    "type": "object",
    "properties": {
        "customer": _LINE,
        "express": {"type": "boolean"},
        "items": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": _LINE, "count": {"type": "integer", "minimum": 1, "maximum": 99}},
                "required": ["name", "count"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 5,
        },
    },
    "required": ["customer", "express", "items"],
    "additionalProperties": False,
}
_SUMS = 'start: n ("+" n)+ "=" n\nn: /[0-9]{1,12}/'
_GRAMMARS = {
    "JSON of a schema": GrammarSource("json_schema", json.dumps(_ORDER)),
    "any JSON object": GrammarSource("json_schema", '{"type": "object"}'),
    "text in JSON": GrammarSource(
        "json_schema", json.dumps({"type": "object", "properties": {"text": {"type": "string"}}})
    ),
    "regex": GrammarSource("regex", "[A-Z][a-z]{2,20}( [a-z]{2,20}){3,30}"),
    "Lark": GrammarSource("grammar", _SUMS),
}

Result = TypeVar("Result")


def run_grammars(model_names: list[str], num_answers: int, answer_len: int) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        model_names: directories, or names of embedded models: of their tokenizers.
        num_answers: under each grammar.
        answer_len: tokens of each at most.
    """
    torch.set_num_threads(1)
    rows = []
    for name in model_names:
        text = ModelText.from_directory(Path(resolve_model(name)))
        grammars = text.grammars(text.vocab_size)
        assert grammars is not None, f"{name} has no token that ends an answer"
        grammars.compile(GrammarSource("regex", "a"))  # the first one reads the vocabulary
        for described, source in _GRAMMARS.items():
            rows.append(
                {
                    "vocabulary": text.vocab_size,
                    "grammar": described,
                    **_measure(grammars, source, text.vocab_size, num_answers, answer_len),
                }
            )
    print_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    print(write_result("grammars", {"answers": num_answers, "answer_len": answer_len, "rows": rows}))


def _measure(
    grammars: Grammars, source: GrammarSource, vocab_size: int, num_answers: int, answer_len: int
) -> dict[str, Any]:
    compiling_ms, grammar = _timed(grammars.compile, source)
    logits, options = torch.empty(1, vocab_size), TurnOptions(temperature=1.0)

    def choose(row: SamplingRow) -> int:
        return draw(logits, [row]).sampled()[0].token_id

    beginning: list[float] = []
    following: list[float] = []
    masked: list[float] = []
    plain: list[float] = []
    for seed in range(num_answers):
        begin_ms, matcher = _timed(grammar.begin)
        beginning.append(begin_ms)
        for position in range(answer_len):
            logits.normal_()
            unmasked = SamplingRow(options, seed, position)
            under_mask = SamplingRow(options, seed, position, allowed=matcher.allowed)
            plain_ms, _ = _timed(choose, unmasked)
            masked_ms, token_id = _timed(choose, under_mask)
            follow_ms, _ = _timed(matcher.accept, token_id)
            plain.append(plain_ms)
            masked.append(masked_ms)
            following.append(follow_ms)
            if matcher.is_complete:
                break
    return {
        "tokens": len(following),
        "compile_ms": round(compiling_ms, 1),
        "begin_ms": round(percentile(beginning, 50), 3),
        "follow_mean_ms": round(sum(following) / len(following), 3),
        "follow_p50_ms": round(percentile(following, 50), 3),
        "follow_p99_ms": round(percentile(following, 99), 3),
        "choice_p50_ms": round(percentile(masked, 50), 3),
        "plain_choice_p50_ms": round(percentile(plain, 50), 3),
    }


def _timed(work: Callable[..., Result], *given: Any) -> tuple[float, Result]:
    """Milliseconds of this thread's processor time, and the result."""
    began_s = time.thread_time()
    result = work(*given)
    return (time.thread_time() - began_s) * 1e3, result
