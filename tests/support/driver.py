"""Drives an engine by hand, step by step, without threads: what a test posts is done when `run` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel

from microturn.engine.wiring import build_engine
from microturn.errors import MicroturnError
from microturn.kv.layer_groups import LayerGroups
from microturn.kv.page_layout import PageLayout
from microturn.kv.pool import PagePool
from microturn.kv.tensors import KVTensors
from microturn.model import recurrent
from microturn.model.cpu.int8_linear import Int8Linear
from microturn.model.cpu.layers import FusedLayers
from microturn.model.cpu.weights import NotKnown
from microturn.model.runner import ModelRunner, Runner
from microturn.model.tracing import trace_layers
from microturn.offload.background import BackgroundThreads, NewBackground
from microturn.sessions.inputs import TokenInput, TurnInput
from microturn.sessions.options import parse_parameters
from microturn.sessions.turn import SessionId, Status, Turn, TurnOutput, TurnRequest
from microturn.settings import Settings
from microturn.snapshots.arrivals import Fetch
from microturn.snapshots.directory import SnapshotDirectory
from microturn.text.codec import Piece
from microturn.text.grammar import Grammars
from support.clock import Clock
from support.gpu_runner import gpu_runner
from support.rounded import exact_of


class IdsOnly:
    """A codec for tests that speak token ids."""

    state: Any = None
    tools: str = ""
    num_held: int = 0

    def state_as_json(self, state: Any) -> Any:
        return state

    def state_from_json(self, written: Any) -> Any:
        return written

    def least_num_ids(self, text: str, enough: int) -> int:
        return len(text)

    def append_text(self, text: str, **_: Any) -> list[int]:
        return [ord(character) for character in text]

    def append_other(self, **_: Any) -> list[int]:
        return []

    def fork(self) -> IdsOnly:
        return IdsOnly()

    def drop_half_character(self) -> None:
        pass

    def drop_held(self) -> None:
        pass

    def begin_generation(self, stop: Sequence[str], *, shows_special: bool = False) -> None:
        pass

    def accept(self, token_id: int) -> Piece:
        return Piece(f"<{token_id}>")

    def end_generation(self) -> str:
        return ""


@dataclass
class Recorder:
    """A sink that keeps what a turn answers."""

    outputs: list[TurnOutput] = field(default_factory=list)
    error: MicroturnError | None = None

    def put(self, output: TurnOutput) -> None:
        assert not self.is_done, "an answer after the last one"
        self.outputs.append(output)

    def fail(self, error: MicroturnError) -> None:
        assert not self.is_done, "an error after the last answer"
        self.error = error

    @property
    def is_done(self) -> bool:
        return self.error is not None or any(output.status for output in self.outputs)

    @property
    def code(self) -> str | None:
        """The code that the turn was refused or failed with."""
        return None if self.error is None else self.error.code

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def status(self) -> Status:
        if self.error is not None:
            raise self.error
        status = self.outputs[-1].status
        assert status is not None, "the turn has not ended"
        return status


class Driver:
    """An engine over a runner, without a thread.

    Args:
        num_pages: of the runner, for each group of the model's layers.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        num_pages: int = 512,
        page_size: int = 16,
        max_context: int = 2048,
        eos_ids: frozenset[int] = frozenset(),
        control_ids: frozenset[int] = frozenset(),
        snapshots: SnapshotDirectory | None = None,
        model_fingerprint: str = "the test's",
        new_codec: Any = lambda _tools: IdsOnly(),
        clock: Any = None,
        prepare_text: Any = None,
        grammars: Grammars | None = None,
        new_background: NewBackground = BackgroundThreads,
        fetch: Fetch | None = None,
        **settings: Any,
    ) -> None:
        self.clock = clock or Clock()
        # States have half of the pages.
        self.pool = PagePool((runner.kv.groups.num_groups + bool(runner.kv.states)) * num_pages, page_size)
        self.engine = build_engine(
            Settings(page_size=page_size, **settings),
            runner,
            self.pool,
            max_context=min(max_context, num_pages * page_size),
            new_codec=new_codec,
            eos_ids=eos_ids,
            control_ids=control_ids,
            snapshots=snapshots,
            model_fingerprint=model_fingerprint,
            files_fingerprint="the files'",
            prepare_text=prepare_text,
            grammars=grammars,
            new_background=new_background,
            fetch=fetch,
            clock=self.clock,
        )

    def post(
        self,
        session_id: SessionId,
        given: Sequence[int] | TurnInput = (),
        *,
        start: bool = False,
        end: bool = False,
        options: str = "",
        **values: Any,
    ) -> tuple[Recorder, Turn]:
        """Posts a turn; options are keyword arguments, or `options` as JSON."""
        import json

        recorder = Recorder()
        turn_options, session_options = parse_parameters(options or json.dumps(values), start=start)
        request = TurnRequest(
            session_id=session_id,
            input=given if isinstance(given, TurnInput) else TokenInput(tuple(given)),
            sink=recorder,
            arrived_s=self.clock(),
            start=start,
            end=end,
            options=turn_options,
            session_options=session_options,
        )
        turn = Turn(request)
        self.engine.submit(turn)
        return recorder, turn

    def run(self, max_steps: int = 100_000) -> None:
        """Steps until nothing is left to do, checking the integrity after each; waits for KV that is on its way."""
        is_busy = False
        for _ in range(max_steps):
            is_busy = self.engine.step(block=is_busy)
            self.engine.check_integrity()
            if not is_busy:
                return
        raise AssertionError("the engine makes no progress")

    def steps(self, num_steps: int) -> None:
        """Steps so often, whether anything is left to do or not, checking the integrity after each."""
        for _ in range(num_steps):
            self.engine.step()
            self.engine.check_integrity()

    def turn(self, session_id: SessionId, given: Sequence[int] | TurnInput = (), **kwargs: Any) -> Recorder:
        """Posts a turn and runs until everything is done."""
        recorder, _ = self.post(session_id, given, **kwargs)
        self.run()
        assert recorder.is_done
        return recorder


def model_runner(
    model: PreTrainedModel,
    *,
    num_pages: int = 512,
    page_size: int = 16,
    layout: PageLayout = PageLayout.PANELS,
    kv_dtype: torch.dtype = torch.float32,
    is_one_group: bool = False,
) -> ModelRunner:
    """A runner over a model with a pool of its own, and with fused layers where they know the model.

    A model that `support.rounded` made is run as the one that it was made of, with 8-bit weights. One that lies on a
    GPU is run there, with torch's attention.

    Args:
        num_pages: for each group of its layers.
        is_one_group: whether all layers share pages, whatever their windows; on a CPU.
    """
    if model.device.type == "cuda":
        return gpu_runner(model, num_pages=num_pages, page_size=page_size, kv_dtype=kv_dtype)
    layers = trace_layers(model)
    groups = LayerGroups.one(layers) if is_one_group else LayerGroups.of(layers)
    state_bytes = recurrent.state_bytes(model)
    kv = KVTensors(
        layers,
        (groups.num_groups + bool(state_bytes)) * num_pages,
        page_size,
        kv_dtype,
        groups=groups,
        layout=layout,
        state_bytes=state_bytes,
    )
    exact = exact_of(model)
    try:
        decoder = FusedLayers.of(model, layers) if exact is None else FusedLayers.of(exact, layers, Int8Linear)
    except NotKnown:
        decoder = None
    return ModelRunner(model, kv, decoder=decoder)


def asynchronous_runner(model: PreTrainedModel, **kwargs: Any) -> ModelRunner:
    """The same, which the engine runs ahead of."""
    runner = model_runner(model, **kwargs)
    runner.is_asynchronous = True
    return runner
