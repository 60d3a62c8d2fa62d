"""Compares what serves, in its types, with what it is to compute: the first layers with float32, graphs with launches.

The check of the layers in float32 (`few_layers`) says nothing of the path that serves: weights in bfloat16, compiled
operations, FlashInfer's kernels, captured graphs. Here rounding hides small mistakes, but not a position off by one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

import torch
from torch import Tensor
from transformers import PreTrainedModel

from microturn.errors import InvalidArgument
from microturn.kv.quantization import LayerScales
from microturn.model.batch import Batch, Row, RowPages
from microturn.model.gpu.few_layers import FewLayers
from microturn.model.gpu.glue import Glue
from microturn.model.gpu.layers import TorchLayers
from microturn.model.gpu.runner import GpuRunner
from microturn.model.positions import num_positions_of
from microturn.model.probe_pages import PAGE_SIZE, SessionPages, new_pages, probe_len
from microturn.model.stock import stock_logits

log = logging.getLogger(__name__)

# Norm of the difference of logits, relative to that of the expected ones, both without the mean of a token's logits.
# In bfloat16 four layers of random models deviate by 5e-3 to 1e-2, and by 4e-2 with weights so wide that attention sees
# few keys; queries whose position is off by one by 1e-1 at least, where attention tells keys apart.
ROUNDING = 3e-2
# Transformers' own layers in the same type deviate as much as ours, within a third: where theirs do by more than usual,
# as with large scores, ours may.
_OF_STOCK = 2.0
# Keys and values in 8 bits have a rounding of their own.
_OF_NARROW_KV = 4.0
# So has a product of 8-bit floats: 1e-1 in four layers of random models. A position off by one is found before, when
# these layers are compared in bfloat16.
_OF_FLOAT8 = 10.0
# Where experts are chosen, rounding may choose others.
_OF_CHOICES = 10.0
# A replayed step is padded, for which products add up in another order: the rounding of one pass, not of the weights,
# but of all layers. 32 of Llama-3.1-8B's shape deviated by 3.9e-2 on an H200.
OF_GRAPHS = 1e-1
_OF_FLOAT8_GRAPHS = 3.0

# New tokens of each session in the steps of a check: appends of any length, beside decoding, and decoding alone.
_STEPS = ((21, 6, 1), (3, 1, 1), (1, 1, 1))


@dataclass(frozen=True)
class _Path:
    """A way to compute the first layers.

    Attributes:
        remedy: the settings by which it is taken.
        glue: None for that of the decoder.
        has_flashinfer: see `GpuRunner`.
        kv_dtype: type of the pages.
    """

    remedy: str
    glue: Glue | None
    has_flashinfer: bool
    kv_dtype: torch.dtype


@torch.inference_mode()
def check_first_layers(
    served: PreTrainedModel,
    few: FewLayers,
    decoder: TorchLayers | None,
    *,
    kv_dtype: torch.dtype,
    has_flashinfer: bool,
    has_float8: bool = False,
    scales: Sequence[LayerScales] | None = None,
) -> None:
    """Compares a model's first layers, as they serve, with the stock model of these layers in float32.

    Args:
        served: these layers in the type that serves (see `FewLayers.in_type_of`).
        few: in float32, which were checked.
        decoder: what serves all layers of the model; None for transformers' own.
        kv_dtype: of the pages.
        has_flashinfer: whether FlashInfer serves.
        has_float8: whether the decoder's weights are 8-bit floats.
        scales: of KV in 8-bit floats, for each layer of the model.

    Raises:
        InvalidArgument: they deviate by more than rounding explains; it names the settings with which they would not.
    """
    sessions, num_layers = _sessions(few), len(few.layers)
    expected = _stock_logits(few.model, sessions)
    of_stock = _deviation_of(_stock_logits(served, sessions), expected)

    def deviation(path: _Path) -> float:
        of_pages = scales[:num_layers] if scales is not None and path.kv_dtype == kv_dtype else None
        runner = GpuRunner(
            served,
            new_pages(served, few.layers, path.kv_dtype, served.device, float8=of_pages),
            few.layers,
            few.scores,
            decoder=None if decoder is None else decoder.first(num_layers, path.glue),
            has_flashinfer=path.has_flashinfer,
            max_tokens=sum(map(len, sessions)),
        )
        return _deviation_of(_logits_in_turns(runner, sessions), expected)

    found = deviation(_Path("", None, has_flashinfer, kv_dtype))
    allowed = max(ROUNDING * (_OF_CHOICES if decoder is None else 1.0), _OF_STOCK * of_stock)
    allowed *= _OF_FLOAT8 if has_float8 else _OF_NARROW_KV if kv_dtype.itemsize == 1 else 1.0
    log.info(
        "probe: logits of the first layers of %s as served deviate by %.1e from float32, transformers' by %.1e",
        type(served).__name__,
        found,
        of_stock,
    )
    # Written so that NaN fails too.
    if not found <= allowed:
        others = _others(served.dtype, decoder, kv_dtype, has_flashinfer=has_flashinfer)
        wider = "weights=bfloat16" if has_float8 else "weights=float32"
        remedy = next((path.remedy for path in others if deviation(path) <= allowed), wider)
        raise InvalidArgument(
            f"{type(served).__name__} cannot be served so: logits of its first layers deviate by {found:.1e} from "
            f"those in float32 (allowed: {allowed:.0e}): set {remedy}"
        )


def _others(
    dtype: torch.dtype, decoder: TorchLayers | None, kv_dtype: torch.dtype, *, has_flashinfer: bool
) -> Iterator[_Path]:
    """Other ways to compute the same, those that cost least first."""
    is_compiled = decoder is not None and decoder.glue != Glue()
    if is_compiled:
        yield _Path("compiled_glue=false", Glue(), has_flashinfer, kv_dtype)
    if has_flashinfer:
        yield _Path("attention=torch", None, False, kv_dtype)
    if is_compiled and has_flashinfer:
        yield _Path("compiled_glue=false and attention=torch", Glue(), False, kv_dtype)
    if kv_dtype != dtype:
        yield _Path("kv_dtype=auto", None, has_flashinfer, dtype)


def _sessions(few: FewLayers) -> list[Sequence[int]]:
    """The ids of two sessions: one as long as the windows that are tested to their end, and a short one."""
    length = min(probe_len(few.layers), num_positions_of(few.model) or PAGE_SIZE)
    vocab_size = int(few.model.get_input_embeddings().weight.shape[0])
    ids = torch.randint(vocab_size, (length + length // 3,), generator=torch.Generator().manual_seed(1)).tolist()
    return [ids[:length], ids[length:]]


def _ends(ids: Sequence[int]) -> list[int]:
    """Where the turns of a session of a check end: two appends, one of which may pass a window, and two of a token."""
    return [0, len(ids) // 3, len(ids) - 2, len(ids) - 1, len(ids)]


def _stock_logits(model: PreTrainedModel, sessions: Sequence[Sequence[int]]) -> Tensor:
    """Logits behind each turn, float32 [turns, vocab_size]: those of all sessions turn by turn."""
    at_ends = [stock_logits(model, ids)[[end - 1 for end in _ends(ids)[1:]]] for ids in sessions]
    return torch.stack(at_ends, dim=1).flatten(0, 1)


def _logits_in_turns(runner: GpuRunner, sessions: Sequence[Sequence[int]]) -> Tensor:
    """The same by a runner, the turns of all sessions in one step."""
    num_pages, num_sessions = runner.kv.num_pages - 1, len(sessions)
    pages = [
        SessionPages.of(runner.kv, range(first, num_pages, num_sessions), len(ids))
        for first, ids in enumerate(sessions)
    ]
    logits = []
    for turn in zip(*(pairwise(_ends(ids)) for ids in sessions), strict=True):
        rows = [of.row(ids[slice(*at)], at[0]) for of, ids, at in zip(pages, sessions, turn, strict=True)]
        logits.append(runner.run(Batch(rows)).clone())
    return torch.cat(logits)


@torch.inference_mode()
def check_graphs(
    runner: GpuRunner, max_rows: int, max_tokens: int, max_context: int, *, has_float8: bool = False
) -> None:
    """Compares steps that are replayed from graphs with the same steps launched; nothing without graphs, or room.

    Args:
        runner: ready to serve; its pages are overwritten.
        max_rows: maximum running sessions.
        max_tokens: maximum tokens of a step.
        max_context: maximum tokens of a session.
        has_float8: whether its weights are 8-bit floats, for which sums in another order choose other numbers.

    Raises:
        InvalidArgument: they deviate by more than rounding explains.
    """
    if not runner.has_graphs:
        return
    steps = list(_steps(runner, max_rows, max_tokens, max_context))
    if not steps:
        return
    replayed = [runner.run(step).clone() for step in steps]
    with runner.without_graphs():
        launched = [runner.run(step).clone() for step in steps]
    # Of each step by itself: a tensor's maximum is NaN if one of them is.
    deviation = float(torch.tensor([_deviation_of(*step) for step in zip(replayed, launched, strict=True)]).max())
    log.info("probe: logits of replayed steps deviate by %.1e from those of launched ones", deviation)
    allowed = OF_GRAPHS * (_OF_FLOAT8_GRAPHS if has_float8 else 1.0)
    if not deviation <= allowed:
        raise InvalidArgument(
            f"{type(runner.model).__name__} cannot be served so: logits of steps that are replayed from CUDA graphs "
            f"deviate by {deviation:.1e} from those of launched steps (allowed: {allowed:.0e}): set cuda_graphs=false"
        )


def _steps(runner: GpuRunner, max_rows: int, max_tokens: int, max_context: int) -> Iterator[Batch]:
    """Steps of a few sessions from their first tokens on, as far as these limits and the pages allow."""
    kv, generator = runner.kv, torch.Generator().manual_seed(2)
    most = -(-sum(nums[0] for nums in _STEPS) // kv.page_size)
    num_rows = min(len(_STEPS[0]), max_rows, max_tokens, (kv.num_pages - 1) // (most * kv.groups.num_groups))
    if num_rows == 0:
        return
    unused = iter(range(kv.num_pages - 1))
    pages = [[list(islice(unused, most * kind.num_groups)) for kind in kv.groups.kinds] for _ in range(num_rows)]
    positions = [0] * num_rows
    for nums in _STEPS:
        rows = []
        for row, num in enumerate(nums[:num_rows]):
            num_tokens = min(num, max_tokens // num_rows)
            position, positions[row] = positions[row], positions[row] + num_tokens
            ids = torch.randint(runner.vocab_size, (num_tokens,), generator=generator).tolist()
            num_pages = -(-positions[row] // kv.page_size)
            first, *others = (
                RowPages(of_kind[: num_pages * kind.num_groups])
                for of_kind, kind in zip(pages[row], kv.groups.kinds, strict=True)
            )
            rows.append(Row(ids, position, first.pages, others=others))
        if max(positions) > max_context:
            return
        yield Batch(rows)


def _deviation_of(got: Tensor, expected: Tensor) -> float:
    """See `ROUNDING`."""
    got, expected = (logits - logits.mean(-1, keepdim=True) for logits in (got, expected))
    return float((got - expected).norm() / expected.norm())
