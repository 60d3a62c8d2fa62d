"""A model that is a hash, for tests of the engine in milliseconds.

It keeps a cell for each slot of each page, in real `KVTensors`: the key is the position, the value says what stands
there. A pass writes its new tokens into the cells, reads every row's whole context back through the row's pages, and
makes the next token depend on all of it. So a page that is lost, lent twice, written by the wrong session or brought
back as another changes the tokens, and `expected_tokens` says from a plain list what they must be. It may have layers
with a window of their own, in two groups: what these see must be what the others see there.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from microturn.kv.layer_groups import LayerGroups, LayerShape
from microturn.kv.tensors import KVTensors
from microturn.kv.window import Window
from microturn.model.batch import UNKNOWN_IDS, Batch, Row
from support.driver import Driver
from support.late_copies import NewCopier
from support.late_draws import fail_late

VOCAB_SIZE = 97
HIDDEN_SIZE = 4

# What stands at a position: a token id, or one embedding [hidden].
Item = int | Tensor

# What has ever stood in a cell, by its number: the same in all runners, as the numbers of a model are.
_values: list[bytes] = []
_numbers: dict[bytes, int] = {}


class FakeRunner:
    """Implements `microturn.model.runner.Runner`.

    Attributes:
        kv: one slot, [num_pages, 2, 1, page_size, 1]: a cell's position and group, and the number of its value.
        batches: all that it was given.
        error: what the next pass raises, once it has spoiled the cells that it was to write.
        late_error: likewise, but when its tokens are asked for (see `late_draws`).
        is_asynchronous: whether the engine may run ahead of it.
    """

    no_window_reason: str | None = None

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        vocab_size: int = VOCAB_SIZE,
        accepts_embeds: bool = True,
        window: int | None = None,
        is_asynchronous: bool = False,
        new_copier: NewCopier = None,
    ) -> None:
        self.is_asynchronous = is_asynchronous
        self.vocab_size = vocab_size
        self.hidden_size = HIDDEN_SIZE
        self.accepts_embeds = accepts_embeds
        self.batches: list[Batch] = []
        self.error: Exception | None = None
        self.late_error: Exception | None = None
        self._page_size = page_size
        layers = [LayerShape(1, 1)] if window is None else [LayerShape(1, 1), *[LayerShape(1, 1, window)] * 2]
        groups = LayerGroups.of(layers)
        num_pages *= groups.num_groups
        self._places = [(kind, group) for kind, of in enumerate(groups.kinds) for group in range(of.num_groups)]
        self.kv = KVTensors(layers, num_pages, page_size, dtype=torch.int64, groups=groups, new_copier=new_copier)
        self.kv.layers[0].elements.fill_(-1)
        self._cells = self.kv.layers[0].elements.numpy()[:, :, 0, :, 0]

    @property
    def num_tokens(self) -> int:
        """Tokens computed so far."""
        return sum(batch.num_tokens for batch in self.batches)

    def run(self, batch: Batch) -> Tensor:
        self.batches.append(batch)
        batch = self._with_ids(batch)
        self._check(batch)
        if self.error is not None:
            error, self.error = self.error, None
            self._spoil(batch)
            raise error
        for row in batch.rows:
            self._write(row, _new_values(row))
        contexts = [self._read(row) for row in batch.rows]
        wanted = [
            context[: len(context) - num_behind]
            for context, row in zip(contexts, batch.rows, strict=True)
            for num_behind in reversed(range(row.num_logits))
        ]
        logits = torch.stack([_logits(context, self.vocab_size) for context in wanted]) if wanted else torch.empty(0, 1)
        if self.late_error is not None:
            fail_late(logits, self.late_error)
            self.late_error = None
            self._spoil(batch)
        return logits

    def _with_ids(self, batch: Batch) -> Batch:
        """The batch with the tokens that the host did not know: each is a row, before the others."""
        unknown = [] if batch.ids is None else batch.ids.tolist()
        rows, others = batch.rows[: len(unknown)], batch.rows[len(unknown) :]
        assert not any(tuple(row.token_ids) == UNKNOWN_IDS for row in others), "a token that nobody knows"
        assert all(tuple(row.token_ids) == UNKNOWN_IDS for row in rows), "tokens that were looked at too early"
        if batch.ids is not None:
            assert self.is_asynchronous, "nobody runs ahead of who is waited for"
            assert batch.ids.dtype == torch.int64
        known = [row._replace(token_ids=[token_id]) for row, token_id in zip(rows, unknown, strict=True)]
        return Batch([*known, *others])

    def _spoil(self, batch: Batch) -> None:
        for row in batch.rows:
            self._write(row, [b"spoilt"] * len(row.token_ids))

    def _check(self, batch: Batch) -> None:
        """A batch must be one that a real model could run."""
        assert batch.rows, "an empty batch"
        num_owners_of = Counter(
            page for row in batch.rows for place in self._places for page in self._row(row, *place).pages
        )
        for row, place in product(batch.rows, self._places):
            seen = self._row(row, *place)
            assert seen.token_ids, "a row without tokens"
            assert len(seen.pages) == -(-seen.context_len // self._page_size), "pages other than the context needs"
            assert len(set(seen.pages)) == len(seen.pages), "a page stands twice"
            written = seen.pages[seen.start // self._page_size :]
            assert all(num_owners_of[page] == 1 for page in written), "a page is written that somebody else reads"

    def _row(self, row: Row, kind: int, group: int) -> Row:
        """The row with the pages of one group of layers."""
        seen = row.seen_by(kind)
        return seen._replace(pages=seen.pages[group :: self.kv.groups.kinds[kind].num_groups])

    def _write(self, row: Row, values: Sequence[bytes]) -> None:
        numbers = [_number(value) for value in values]
        for number, place in enumerate(self._places):
            seen = self._row(row, *place)
            at = np.arange(seen.start, seen.context_len)
            pages, slots = np.array(seen.pages)[at // self._page_size], at % self._page_size
            self._cells[pages, 0, slots] = (at + seen.num_evicted) * len(self._places) + number
            self._cells[pages, 1, slots] = numbers

    def _read(self, row: Row) -> list[bytes]:
        """What the first group sees; the others must see the same, as far as they look back."""
        seen, *others = (self._seen(row, number) for number in range(len(self._places)))
        for other in others:
            assert other.items() <= seen.items(), "layers do not see the same"
        return [_values[number] for number in seen.values()]

    def _seen(self, row: Row, number: int) -> dict[int, int]:
        """The numbers of the values that a group of layers sees, by their positions."""
        seen, window = self._row(row, *self._places[number]), self.kv.groups.kinds[self._places[number][0]].window
        oldest = 0 if window is None else max(0, seen.start - window + 1)
        cells = self._cells[np.array(seen.pages)]
        keys, values = (cells[:, part].reshape(-1)[oldest : seen.context_len].tolist() for part in (0, 1))
        positions = [at if at < seen.num_sinks else at + seen.num_evicted for at in range(oldest, seen.context_len)]
        expected = [position * len(self._places) + number for position in positions]
        assert keys == expected, "a position was never computed, or its page is another's"
        return dict(zip(positions, values, strict=True))


class FakeDriver(Driver):
    """An engine over a `FakeRunner`, with small pages: so many for each group of its layers."""

    def __init__(
        self,
        *,
        num_pages: int = 128,
        page_size: int = 4,
        accepts_embeds: bool = True,
        window: int | None = None,
        is_asynchronous: bool = False,
        new_copier: NewCopier = None,
        **kwargs: Any,
    ) -> None:
        self.runner = FakeRunner(
            num_pages=num_pages,
            page_size=page_size,
            accepts_embeds=accepts_embeds,
            window=window,
            is_asynchronous=is_asynchronous,
            new_copier=new_copier,
        )
        super().__init__(self.runner, num_pages=num_pages, page_size=page_size, **kwargs)


def expected_tokens(
    history: Sequence[Item], num_tokens: int, *, vocab_size: int = VOCAB_SIZE, window: Window | None = None
) -> list[int]:
    """The greedy tokens that must follow a history, of which a window may show a part only."""
    values = [_value(item) for item in history]
    token_ids: list[int] = []
    for _ in range(num_tokens):
        seen = values
        if window is not None:
            last_sink = window.num_sinks
            seen = values[:last_sink] + values[last_sink + window.evicted(len(values) - 1) :]
        token_ids.append(int(_logits(seen, vocab_size).argmax()))
        values.append(_value(token_ids[-1]))
    return token_ids


def expected_logits(history: Sequence[Item], *, vocab_size: int = VOCAB_SIZE) -> Tensor:
    """The logits [vocab_size] that must follow a history."""
    return _logits([_value(item) for item in history], vocab_size)


def _new_values(row: Row) -> list[bytes]:
    values = [_value(token_id) for token_id in row.token_ids]
    for span in row.embeds:
        values[span.start : span.start + len(span.embeds)] = [_value(embed) for embed in span.embeds]
    assert len(values) == len(row.token_ids), "embeddings beyond the row"
    return values


def _value(item: Item) -> bytes:
    return b"i%d " % item if isinstance(item, int) else b"e" + item.numpy().tobytes()


def _number(value: bytes) -> int:
    if value not in _numbers:
        _numbers[value] = len(_values)
        _values.append(value)
    return _numbers[value]


def _logits(values: Sequence[bytes], vocab_size: int) -> Tensor:
    digest = hashlib.blake2b(b"".join(values), digest_size=8).digest()
    return _drawn_logits(int.from_bytes(digest, "big") >> 1, vocab_size).clone()  # the sampler bans ids in place


@lru_cache(maxsize=4096)
def _drawn_logits(seed: int, vocab_size: int) -> Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))
