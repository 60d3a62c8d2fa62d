"""The plain reference of the sampler: what the contract says, row by row and token by token, in float64."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from microturn.model.sampling_row import SamplingRow
from microturn.sessions.options import TurnOptions
from microturn.sessions.token_counts import TokenCounts

GREATEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class PlainChoice:
    """A token, and by how much the closest of all comparisons was decided that led to it.

    Where that is no more than a rounding error in float32, another token is as right.
    """

    token_id: int
    margin: float


def plain_choice(logits: Sequence[float], row: SamplingRow) -> PlainChoice:
    if row.options.temperature == 0:
        scores = changed(logits, row)
        token_id = scores.index(max(scores))
        # Which token is the greatest where some are no numbers is left open.
        return PlainChoice(token_id, 0.0 if any(map(math.isnan, logits)) else least_gap(scores, scores[token_id]))
    probs, margin = distribution(logits, row)
    dice, mass = uniform(row.seed, row.position), 0.0
    for token_id, prob in enumerate(probs):
        if mass <= dice < mass + prob:
            return PlainChoice(token_id, min(margin, dice - mass, mass + prob - dice))
        mass += prob
    return PlainChoice(max(token_id for token_id, prob in enumerate(probs) if prob > 0), 0.0)


def distribution(logits: Sequence[float], row: SamplingRow) -> tuple[list[float], float]:
    """The probabilities of all tokens, and how close the filters' closest comparison was."""
    options, margin = row.options, math.inf
    logits = [logit / max(options.temperature, 1e-5) for logit in changed(logits, row)]
    greatest = max(logits)
    probs = normalized([math.exp(logit - greatest) for logit in logits])
    if 0 < options.top_k < len(probs):
        least = sorted(logits, reverse=True)[options.top_k - 1]
        margin = min(margin, least_gap(logits, least))
        probs = normalized([prob if logit >= least else 0.0 for logit, prob in zip(logits, probs, strict=True)])
    if options.top_p < 1:
        likelier, kept = 0.0, set()
        for prob, count in sorted(Counter(probs).items(), reverse=True):
            margin = min(margin, abs(likelier - options.top_p))
            if likelier < options.top_p:
                kept.add(prob)
            likelier += prob * count
        probs = normalized([prob if prob in kept else 0.0 for prob in probs])
    if options.min_p > 0:
        likeliest = max(probs)
        margin = min(margin, least_gap([prob / likeliest for prob in probs], options.min_p))
        probs = normalized([prob if prob >= options.min_p * likeliest else 0.0 for prob in probs])
    return probs, margin


def changed(logits: Sequence[float], row: SamplingRow) -> list[float]:
    """The logits after penalties, biases and bans, all of them numbers but those of tokens that are not allowed."""
    options, counts, banned, result = row.options, times_seen(row), set(row.banned_ids), []
    biases, spared = dict(options.logit_bias), set(row.spared_ids.tolist())
    for token_id, logit in enumerate(logits):
        if counts[token_id]:
            logit = logit / options.repetition_penalty if logit > 0 else logit * options.repetition_penalty
            if token_id not in spared:
                logit -= options.frequency_penalty * counts[token_id] + options.presence_penalty
        logit += biases.get(token_id, 0.0)
        logit = 0.0 if math.isnan(logit) else max(-GREATEST, min(GREATEST, logit))
        logit = -GREATEST if token_id in banned else logit
        result.append(logit if is_allowed(row, token_id) else -math.inf)
    return result


def is_allowed(row: SamplingRow, token_id: int) -> bool:
    """Whether the row's mask has a token's bit."""
    return row.allowed is None or bool(int(row.allowed[token_id // 32]) >> token_id % 32 & 1)


def times_seen(row: SamplingRow) -> Counter[int]:
    """How often each token is in the context."""
    seen = Counter(dict(zip(row.seen.ids.tolist(), row.seen.counts.tolist(), strict=True)))
    if row.unknown is not None:
        seen.update(row.unknown.tolist())
    return seen


def uniform(seed: int, position: int) -> float:
    """SplitMix64 as its authors wrote it, in numbers of any length."""
    return (_splitmix64(_splitmix64(seed) ^ position) >> 11) * 2.0**-53


def _splitmix64(state: int) -> int:
    mask = 2**64 - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & mask
    return state ^ (state >> 31)


def normalized(weights: Sequence[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def least_gap(values: Sequence[float], border: float) -> float:
    """How far from a border the closest value is that is not on it."""
    return min((abs(value - border) for value in values if value != border), default=math.inf)


def chi_square(counts: Counter[int], probs: Sequence[float]) -> tuple[float, int]:
    """How far counts are from a distribution, and the degrees of freedom."""
    num_draws = sum(counts.values())
    possible = [token_id for token_id, prob in enumerate(probs) if prob > 0]
    assert set(counts) <= set(possible), "a token came that was ruled out"
    terms = [(counts[i] - num_draws * probs[i]) ** 2 / (num_draws * probs[i]) for i in possible]
    return sum(terms), len(possible) - 1


# ---- steps that may be anything ------------------------------------------------------------------------------------


def random_step(rng: random.Random, num_rows: int, vocab_size: int) -> tuple[Tensor, list[SamplingRow]]:
    """Logits [rows, vocab_size] and rows that ask for anything, not two for the same."""
    rows = [_random_row(rng, vocab_size) for _ in range(num_rows)]
    return torch.tensor([_random_logits(rng, vocab_size) for _ in rows]).view(num_rows, vocab_size), rows


def _random_row(rng: random.Random, vocab_size: int) -> SamplingRow:
    options: dict[str, Any] = {
        "temperature": rng.choice([0, 0.3, 0.8, 1.0, 2.0]),
        "top_k": rng.choice([0, 0, 1, 2, 50, 300, vocab_size, 2**31 - 1]),
        "top_p": rng.choice([1, 1, 0.95, 0.5, 1e-3]),
        "min_p": rng.choice([0, 0, 0, 0.05, 1]),
        "logprobs": rng.random() < 0.3,
    }
    if rng.random() < 0.4:
        options["repetition_penalty"] = rng.choice([0.7, 1, 1.3])
        options["frequency_penalty"] = rng.choice([-0.2, 0, 0.5])
        options["presence_penalty"] = rng.choice([-0.5, 0, 1])
    if rng.random() < 0.3:
        biased = rng.sample(range(vocab_size), rng.choice([1, vocab_size]))
        options["logit_bias"] = tuple((token_id, rng.choice([-100.0, -1.0, 0.5, 100.0])) for token_id in biased)
    history = [rng.randrange(vocab_size) for _ in range(rng.choice([0, 1, 30, 2 * vocab_size]))]
    banned_ids = rng.sample(range(vocab_size), rng.choice([0, 0, 1, vocab_size // 2]))
    num_known = max(0, len(history) - rng.choice([0, 0, 0, 1, 3]))
    return SamplingRow(
        TurnOptions(**options),
        rng.randrange(2**63),
        rng.randrange(2**31),
        TokenCounts.of(history[:num_known]),
        banned_ids,
        unknown=torch.tensor(history[num_known:]) if num_known < len(history) else None,
        allowed=_random_mask(rng, vocab_size) if rng.random() < 0.3 else None,
        spared_ids=np.array(rng.sample(range(vocab_size + 3), rng.choice([0, 0, 1, vocab_size // 2])), np.int64),
    )


def _random_mask(rng: random.Random, vocab_size: int) -> NDArray[np.uint32]:
    return mask_of(rng.sample(range(vocab_size), rng.choice([1, 2, vocab_size])), vocab_size)


def mask_of(token_ids: Sequence[int], vocab_size: int) -> NDArray[np.uint32]:
    """A mask that allows these tokens, as `SamplingRow.allowed`."""
    words = np.zeros(-(-vocab_size // 32), np.uint32)
    for token_id in token_ids:
        words[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words


def _random_logits(rng: random.Random, vocab_size: int) -> list[float]:
    scale = rng.choice([0.1, 1, 5])
    logits = [rng.gauss(0, scale) for _ in range(vocab_size)]
    if rng.random() < 0.5:  # many are equal
        logits = [round(4 * logit) / 4 for logit in logits]
    if rng.random() < 0.2:
        share = rng.choice([0.01, 0.5, 1])
        logits = [rng.choice([math.inf, -math.inf, math.nan]) if rng.random() < share else logit for logit in logits]
    return logits
