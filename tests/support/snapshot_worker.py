"""A server of SmolLM2, or of a tiny model, that takes saved sessions up in whatever process runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from microturn.model import runner
from microturn.model.fingerprint import model_fingerprint
from microturn.sessions.inputs import EmbedInput, TextInput, TokenInput, TurnInput
from microturn.snapshots.directory import SnapshotDirectory
from microturn.text.model_text import ModelText
from microturn.text.session_text import SessionText
from support import models, share
from support.driver import Driver, model_runner


@dataclass(frozen=True)
class Said:
    """A turn: text, ids or embeddings [n][hidden], and options."""

    given: str | Sequence[int] | Sequence[Sequence[float]] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def input(self) -> TurnInput:
        if isinstance(self.given, str):
            return TextInput(self.given)
        if self.given and isinstance(self.given[0], Sequence):
            return EmbedInput(torch.tensor(self.given))
        return TokenInput(tuple(self.given))


@dataclass(frozen=True)
class Heard:
    """What a turn answered; and how many tokens were computed for it, which is no part of the answer."""

    token_ids: Sequence[int]
    text: str
    appended_ids: Sequence[int]
    context_len: int
    seed: int
    num_computed: int = field(compare=False)


def open_driver(model_name: str, directory: Path) -> Driver:
    """A driver that finds its saved sessions in a directory.

    Args:
        model_name: a model directory, or the name of a tiny model.
        directory: of the snapshots.
    """
    snapshots = SnapshotDirectory(directory, ttl_s=3600)
    runner.set_num_threads(share.num_threads())  # as in the process that saved them
    if hasattr(models, model_name):
        return Driver(model_runner(getattr(models, model_name)()), snapshots=snapshots, model_fingerprint=model_name)
    model_text = ModelText.from_directory(Path(model_name))
    return Driver(
        model_runner(runner.load_model(model_name)),
        snapshots=snapshots,
        model_fingerprint=model_fingerprint(model_name),
        new_codec=partial(SessionText, model_text),
        eos_ids=model_text.eos_ids,
        window_slack=16,
    )


def talk(driver: Driver, session_id: str, turns: Sequence[Said], **first: Any) -> list[Heard]:
    """Takes turns one after the other; the first with more options."""
    heard = []
    for number, said in enumerate(turns):
        options = {"return_appended_ids": True, **said.options, **(first if number == 0 else {})}
        answer = driver.turn(session_id, said.input, **options)
        status, appended_ids = answer.status, answer.outputs[-1].appended_ids
        assert appended_ids is not None
        num_computed = status.usage["computed_tokens"]
        heard.append(Heard(answer.token_ids, answer.text, appended_ids, status.context_len, status.seed, num_computed))
    return heard


def go_on(model_name: str, directory: Path, sessions: Mapping[str, Sequence[Said]]) -> dict[str, list[Heard]]:
    """Takes sessions up from a directory and goes on with them."""
    driver = open_driver(model_name, directory)
    return {name: talk(driver, name, turns, start=True, resume=True) for name, turns in sessions.items()}
