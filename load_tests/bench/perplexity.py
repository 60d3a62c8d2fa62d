"""How well a model predicts a real text, teacher-forced through the engine's runner.

Every token but the first of a context is predicted from all before it. Each token is a row of its own, as in decoding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from load_tests.bench import texts
from microturn.model import runner
from microturn.model.batch import Batch, Row

_STEP_TOKENS = 64


def contexts(model_dir: Path, num_contexts: int, context_len: int) -> list[list[int]]:
    """The beginning of the text, in pieces."""
    ids = texts.token_ids(model_dir)
    if len(ids) < num_contexts * context_len:
        raise SystemExit(f"the text has {len(ids)} tokens: ask for fewer or shorter contexts")
    return [ids[first : first + context_len] for first in range(0, num_contexts * context_len, context_len)]


def surprises(
    model_runner: runner.ModelRunner, contexts: list[list[int]], name: str, *, in_one_row: bool = False
) -> Tensor:
    """Negative log-likelihoods of all tokens but the first, float64 [contexts, context_len - 1].

    With `in_one_row` the tokens of a step are those of one row, which is faster where torch attends row by row.
    """
    page_size = model_runner.kv.page_size
    found = torch.empty(len(contexts), len(contexts[0]) - 1, dtype=torch.float64)
    for context, ids in enumerate(tqdm(contexts, desc=name, unit="context", leave=False)):
        for first in range(0, len(ids) - 1, _STEP_TOKENS):
            positions = range(first, min(first + _STEP_TOKENS, len(ids) - 1))
            pages = list(range(positions[-1] // page_size + 1))
            rows = [Row([ids[at]], at, pages[: at // page_size + 1]) for at in positions]
            if in_one_row:
                rows = [Row(ids[first : positions.stop], first, pages, num_drafts=len(positions) - 1)]
            following = torch.tensor([ids[at + 1] for at in positions])[:, None]
            likelihoods = model_runner.run(Batch(rows)).double().log_softmax(-1).gather(1, following)
            found[context, first : positions.stop] = -likelihoods[:, 0]
    return found


def compared(found: Tensor, exact: Tensor) -> dict[str, float]:
    """The perplexity, and its change against another's in percent.

    The change's standard error is that of the mean over paired differences, one per token.
    """
    return {
        "perplexity": math.exp(found.mean()),
        "change_percent": 100 * math.expm1((found - exact).mean()),
        "standard_error_percent": 100 * float((found - exact).std()) / math.sqrt(exact.numel()),
    }


def cells(figures: Mapping[str, float]) -> list[str]:
    """The perplexity and its change, of what `compared` returns, for a table."""
    change = f"{figures['change_percent']:+.3f} ± {figures['standard_error_percent']:.3f}"
    return [f"{figures['perplexity']:.4f}", change]
