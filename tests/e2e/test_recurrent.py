"""A model with recurrent layers on the real server: cuts, branches, and sessions that outlive the server."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from support import models, tiny_tokenizers
from support.models import VOCAB_SIZE
from support.oracle import check_greedy
from support.raw import RawStream, ids
from support.share import IN_FLOAT32, model_server


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return models.recurrent()


@pytest.fixture(scope="module")
def model_dir(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "recurrent"
    tiny_tokenizers.save(tiny_tokenizers.byte_level(VOCAB_SIZE), directory)
    model.save_pretrained(directory)
    return directory


class Talk:
    """One session: what it has been told and has said.

    Args:
        model: the stock model.
        session_id: of the session.
    """

    def __init__(self, model: PreTrainedModel, session_id: str, history: list[int] | None = None) -> None:
        self.history = [] if history is None else [*history]
        self._model = model
        self._id = session_id

    def turn(self, stream: RawStream, given: list[int], *, start: bool = False, **options: Any) -> int:
        """A turn, checked against the stock model; returns how many tokens it computed."""
        options = {"max_tokens": 6, "ignore_eos": True, **options}
        answer = stream.ask(self._id, start=start, options=options, input_ids=ids(*given))
        assert answer.error is None, answer.error
        self.history += [*given, *answer.token_ids]
        check_greedy(self._model, self.history, range(len(self.history) - 6, len(self.history)))
        return int(answer.status["usage"]["computed_tokens"])


def test_sessions_go_on_cut_branched_and_on_the_next_server(
    model: PreTrainedModel, model_dir: Path, tmp_path: Path
) -> None:
    rng = random.Random(0)
    serve = partial(
        model_server, str(model_dir), *IN_FLOAT32, "max_context=1024", arguments=("--snapshot-dir", str(tmp_path))
    )
    talk = Talk(model, "talk")
    with serve() as server, RawStream(server.address) as stream:
        for number in range(5):
            talk.turn(stream, rng.choices(range(VOCAB_SIZE), k=50), start=number == 0)
        del talk.history[-4:]
        assert talk.turn(stream, [5], rewind_to=len(talk.history)) <= 64 + 1 + 6
        branch = Talk(model, "branch", talk.history)
        assert branch.turn(stream, [7], start=True, fork_of="talk") <= 64 + 1 + 6
        refused = stream.ask("window", start=True, options={"overflow": "window"}, input_ids=ids(1))
        assert "its recurrent layers remember what a window evicts" in str(refused.error)
    with serve() as server, RawStream(server.address) as stream:
        # Its state has come back with it: of the last turn one token was not computed yet.
        assert talk.turn(stream, [9], start=True, resume=True) == 1 + 1 + 5
