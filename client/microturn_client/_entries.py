"""Turns that have ended, one behind the other, in columns: seventeen bytes a turn beside its tokens and its text.

A session takes a turn every 200 ms for hours, and a Python object for each would be most of what a client holds. So
ids are one array, texts are one string of bytes, and an ``Entry`` is made when somebody asks for one.

    turns        ids 1 2 │ text "ab " │ text "c" │ ids 5        ids that became themselves are kept once
    answers          9 9 │            │          │     8
    _ids         1 2 9 9   3 4                     5 8
    _ends              4     6          6            8
    _texts                 ab           c
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from microturn_client._inputs import InputTensor, encode_input

# Stand among token ids for an embedding, and for what the server did not tell.
EMBEDDING = -1
UNKNOWN = -2

_BYTES_PER_ENTRY = 17
_BYTES_PER_MANNER = 500  # roughly, of two dictionaries


@dataclass(frozen=True)
class Manner:
    """How a turn was meant and answered.

    Attributes:
        options: how the input was meant: ``role``, ``parse_special``.
        sampling: how its tokens were chosen.
    """

    options: Mapping[str, object] = field(default_factory=dict)
    sampling: Mapping[str, object] = field(default_factory=dict)


PLAIN = Manner()


@dataclass(frozen=True)
class Entry:
    """One turn that has ended.

    Attributes:
        tensor: its input, as it was sent.
        manner: see there.
        start: absolute position of its first token.
        input_ids: what the input became, ``EMBEDDING`` for each embedding, ``UNKNOWN`` where the server did not say.
        output_ids: what was generated.
        is_settled: no text was held back behind it.
    """

    tensor: InputTensor
    manner: Manner
    start: int
    input_ids: array[int]
    output_ids: array[int]
    is_settled: bool = True

    @property
    def options(self) -> Mapping[str, object]:
        return self.manner.options

    @property
    def is_plain(self) -> bool:
        """Whether its input was ids, and became these and no others."""
        is_ids = self.tensor.name == "input_ids" and not self.options
        return is_ids and self.input_ids.tobytes() == self.tensor.data

    @property
    def output_start(self) -> int:
        return self.start + len(self.input_ids)

    @property
    def end(self) -> int:
        return self.output_start + len(self.output_ids)


class Entries:
    """The entries of one session.

    Args:
        start: absolute position of the first.
    """

    def __init__(self, start: int = 0) -> None:
        self.start = start
        self._ids = array("i")
        self._output_starts = array("i")
        self._ends = array("i")
        self._settled = bytearray()
        self._texts = bytearray()
        self._text_ends = array("q")
        # Of what is not text, and not ids that became themselves: embeddings mostly, which are large by themselves.
        self._tensors: dict[int, InputTensor] = {}
        self._num_tensor_bytes = 0
        # Most turns are meant as the one before them was.
        self._manner_starts: list[int] = []
        self._manners: list[Manner] = []

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[Entry]:
        return self.between(0, len(self))

    @property
    def end(self) -> int:
        """Absolute position behind the last."""
        return self._ends[-1] if self._ends else self.start

    @property
    def longest(self) -> int:
        """Tokens of the longest of them; 0 where there is none."""
        starts = (self.start, *self._ends)
        return max((end - start for start, end in zip(starts, self._ends, strict=False)), default=0)

    @property
    def num_bytes(self) -> int:
        """About how much memory they take."""
        columns = 4 * len(self._ids) + _BYTES_PER_ENTRY * len(self) + len(self._texts)
        return columns + _BYTES_PER_MANNER * len(self._manners) + self._num_tensor_bytes

    @property
    def ids(self) -> array[int]:
        """All token ids, as in ``Entry``."""
        return self._ids[:]

    def end_of(self, num_entries: int) -> int:
        """Absolute position behind so many of the first entries."""
        return self._ends[num_entries - 1] if num_entries else self.start

    def is_settled(self, num_entries: int) -> bool:
        """Whether no text is held behind so many of the first entries."""
        return not num_entries or bool(self._settled[num_entries - 1])

    @property
    def has_unknown(self) -> bool:
        """Whether the server did not say what an input became."""
        return UNKNOWN in self._ids

    @property
    def has_roles(self) -> bool:
        """Whether any turn had a role."""
        return any("role" in manner.options for manner in self._manners)

    def append(self, entry: Entry) -> None:
        """Adds an entry behind the others; it starts where they end."""
        index = len(self)
        if entry.tensor.name == "text_input":
            self._texts += entry.tensor.data
        elif not (entry.tensor.name == "input_ids" and entry.input_ids.tobytes() == entry.tensor.data):
            self._tensors[index] = entry.tensor
            self._num_tensor_bytes += len(entry.tensor.data)
        if not self._manners or self._manners[-1] != entry.manner:
            self._manner_starts.append(index)
            self._manners.append(entry.manner)
        self._ids += entry.input_ids
        self._output_starts.append(self.start + len(self._ids))
        self._ids += entry.output_ids
        self._ends.append(self.start + len(self._ids))
        self._settled.append(entry.is_settled)
        self._text_ends.append(len(self._texts))

    def between(self, first: int, last: int) -> Iterator[Entry]:
        """The entries of these indices, the last not included."""
        return map(self._entry, range(first, last))

    def num_before(self, position: int) -> int:
        """How many entries end at a position or before."""
        return bisect_right(self._ends, position)

    def num_up_to_answer(self) -> int:
        """How many entries there are up to the last that generated anything, that one included."""
        pairs = zip(reversed(self._output_starts), reversed(self._ends), strict=True)
        behind = next((number for number, (start, end) in enumerate(pairs) if start < end), len(self))
        return len(self) - behind

    def num_up_to_settled(self) -> int:
        """How many entries there are up to the last behind which no text was held, that one included."""
        return self._settled.rfind(1) + 1

    def keep(self, num_entries: int) -> None:
        """Forgets all but so many of the first."""
        for index in [index for index in self._tensors if index >= num_entries]:
            self._num_tensor_bytes -= len(self._tensors.pop(index).data)
        del self._ends[num_entries:], self._output_starts[num_entries:], self._settled[num_entries:]
        del self._ids[self.end - self.start :], self._text_ends[num_entries:]
        del self._texts[self._text_ends[-1] if self._text_ends else 0 :]
        num_manners = bisect_right(self._manner_starts, num_entries - 1)
        del self._manner_starts[num_manners:], self._manners[num_manners:]

    def tail(self, first: int) -> Entries:
        """A copy of the entries from this index on."""
        copy = Entries(self.end_of(first))
        for entry in self.between(first, len(self)):
            copy.append(entry)
        return copy

    def _entry(self, index: int) -> Entry:
        start = self.end_of(index)
        at, output_at, end = start - self.start, self._output_starts[index] - self.start, self._ends[index] - self.start
        input_ids = self._ids[at:output_at]
        text_start = self._text_ends[index - 1] if index else 0
        tensor = self._tensors.get(index)
        if tensor is None and text_start < self._text_ends[index]:
            data = bytes(self._texts[text_start : self._text_ends[index]])
            tensor = InputTensor("text_input", "BYTES", (1, 1), data, is_empty=len(data) == 4)
        elif tensor is None:
            tensor = encode_input(input_ids)
        manner = self._manners[bisect_right(self._manner_starts, index) - 1]
        return Entry(tensor, manner, start, input_ids, self._ids[output_at:end], bool(self._settled[index]))
