"""Speculation by prompt lookup: tokens a second of one session with it and without it, on texts of several kinds.

A session on the real server takes a text, then one turn generates from it. Sessions with and without speculation take
turns; whether both answered the same tokens is said for each text, since positions are computed beside each other with
it, and 8-bit weights round otherwise then. In *code* and *quotation* the answer says again what the text has said;
*list* has a form that recurs with other words; *prose* is greedy, where a small model soon repeats itself; *drawn* is
sampled at temperature 1 and repeats nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median
from typing import Literal

from tqdm import tqdm

from load_tests.bench.results import print_table, write_result
from microturn.serve.child import running_server
from microturn_client import Client, TurnEnd

NUM_TOKENS = 200
Speculate = Literal["off", "ngram"]

_CODE = """\
class Basket:
    def __init__(self, owner, currency):
        self.owner = owner
        self.currency = currency
        self.items = []

    def add(self, name, price, quantity):
        self.items.append((name, price, quantity))

    def total(self):
        return sum(price * quantity for name, price, quantity in self.items)

    def remove(self, name):
        self.items = [item for item in self.items if item[0] != name]

    def is_empty(self):
        return len(self.items) == 0
"""
_LETTER = (
    "Dear Ms. Okafor, your order of 14 March was sent on Tuesday from our store in Rotterdam and should reach you in "
    "three working days. The lamp is packed apart from its shade, since the glass is thin. Should a part be missing or "
    "broken, write to us within two weeks, with a picture, and we will send another one at once. The invoice is in the "
    "box. With kind regards, the team of Lichthuis."
)
# With the temperature of the answer.
TEXTS = {
    "code": (f"{_CODE}\n# The same class once more, with the field `items` renamed to `lines`:\n\n{_CODE[:60]}", 0.0),
    "quotation": (f'The letter: "{_LETTER}"\n\nThe same letter, word by word: "{_LETTER[:40]}', 0.0),
    "list": (
        "Countries and their capitals.\nFrance: the capital is Paris.\nSpain: the capital is Madrid.\nItaly:",
        0.0,
    ),
    "prose": ("The old lighthouse keeper climbed the stairs every evening and", 0.0),
    "drawn": ("The old lighthouse keeper climbed the stairs every evening and", 1.0),
}


@dataclass(frozen=True)
class Answer:
    """What one turn answered, and how fast."""

    tokens_per_s: float
    num_drafted: int
    num_accepted: int
    token_ids: tuple[int, ...]


def run_speculation(model: str, num_runs: int) -> None:
    """Measures, prints a table and writes a JSON file.

    Args:
        model: a directory, or the name of an embedded model.
        num_runs: of each text, with and without speculation.
    """
    answers: dict[str, dict[Speculate, list[Answer]]] = {text: {"off": [], "ngram": []} for text in TEXTS}
    with running_server(model) as address, Client(address) as client:
        for _ in tqdm(range(num_runs), unit="run"):
            for text, of_text in answers.items():
                for speculate, of_kind in of_text.items():
                    of_kind.append(_answer(client, text, speculate))
    rows, figures = [], {}
    for text, of_text in answers.items():
        per_s = {name: median(answer.tokens_per_s for answer in of_kind) for name, of_kind in of_text.items()}
        last = of_text["ngram"][-1]
        figures[text] = {
            "times_faster": per_s["ngram"] / per_s["off"],
            "tokens_per_s": {name: [answer.tokens_per_s for answer in of_kind] for name, of_kind in of_text.items()},
            "drafted": last.num_drafted,
            "accepted": last.num_accepted,
            "same_tokens": last.token_ids == of_text["off"][-1].token_ids,
        }
        same = "yes" if figures[text]["same_tokens"] else "no"
        rows.append([text, figures[text]["times_faster"], *per_s.values(), last.num_drafted, last.num_accepted, same])
    print(f"\none session, {NUM_TOKENS} tokens a turn, medians of {num_runs} runs")
    print_table(["text", "times faster", "off, tokens/s", "ngram, tokens/s", "drafted", "accepted", "same"], rows)
    result = {"protocol": __doc__, "model": model, "num_tokens": NUM_TOKENS, "texts": figures}
    print("written:", write_result("speculation", result))


def _answer(client: Client, text: str, speculate: Speculate) -> Answer:
    given, temperature = TEXTS[text]
    with client.session(speculate=speculate, ignore_eos=True, temperature=temperature, seed=5) as session:
        # The prompt and a first token, so that what is timed is the steps alone.
        *_, _first = session.turn(given, max_tokens=1)
        started_s = time.perf_counter()
        events = list(session.turn([], max_tokens=NUM_TOKENS))
        elapsed_s = time.perf_counter() - started_s
    (end,) = (event for event in events if isinstance(event, TurnEnd))
    token_ids = tuple(token_id for event in events[:-1] for token_id in getattr(event, "ids", ()))
    usage = end.status.usage
    return Answer(usage.output_tokens / elapsed_s, usage.drafted_tokens, usage.accepted_tokens, token_ids)
