"""The turns by which a session is told entries again that its server has lost."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from microturn_client._entries import EMBEDDING, Entry
from microturn_client._inputs import InputTensor, encode_input

# A character has at most four bytes, and a token that is text has one: so many tokens say what is left of it.
_NUM_GENERATED_AGAIN = 4


@dataclass(frozen=True)
class Piece:
    """One turn of a replay; it generates nothing unless its options say so."""

    tensor: InputTensor
    options: Mapping[str, object] = field(default_factory=dict)


def pieces_of(entries: Iterable[Entry], *, by_ids: bool, most: float, generates_last: bool = False) -> list[Piece]:
    """Turns that tell entries; ids that follow upon each other are one.

    Args:
        entries: what is told.
        by_ids: by ids and embeddings, whatever they were; else as they were said.
        most: so many tokens one turn tells at most; no entry is longer.
        generates_last: the last tokens of the last entry are generated again.
    """
    pieces: list[Piece] = []
    plain = array("i")
    last: Entry | None = None
    for last in entries:
        if plain and len(plain) + last.end - last.start > most:
            pieces.append(Piece(encode_input(plain)))
            plain = array("i")
        is_embeds = last.tensor.name == "input_embeds"
        says_nothing = last.tensor.is_empty and "role" not in last.options  # a server would give it no number
        if by_ids or last.is_plain:
            plain += last.input_ids[: len(last.input_ids) - last.input_ids.count(EMBEDDING)]
        if is_embeds or not (by_ids or last.is_plain or says_nothing):
            pieces += [Piece(encode_input(plain))] if plain else []
            pieces.append(Piece(last.tensor, {} if by_ids else last.options))
            plain = array("i")
        plain += last.output_ids
    if generates_last and last is not None:
        num_tokens = min(_NUM_GENERATED_AGAIN, len(last.output_ids))
        given = encode_input(plain[: len(plain) - num_tokens])
        sampling = last.manner.sampling
        goes_on = {} if "grammar_from" in sampling else {"ignore_eos": True}
        return [*pieces, Piece(given, {**sampling, **goes_on, "max_tokens": num_tokens})]
    return [*pieces, Piece(encode_input(plain))] if plain else pieces
