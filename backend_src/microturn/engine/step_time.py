"""How long forward passes take, learnt from those that were made."""

from __future__ import annotations

from collections.abc import Iterable

# Weight of a new pass in the exponentially weighted averages: passes older than forty hardly count.
_EWMA_WEIGHT = 0.05
# A pass counts as at most so many times what was expected: outliers come from the machine, not from the model.
_OUTLIER_CAP = 3.0
# Variance of token counts, in tokens squared, below which passes of nearly one size say little about the slope.
_LEAST_VARIANCE = 16.0


class StepTimeModel:
    """Expects a pass of n tokens to take ``start + n * per_token``: the weights are read once, the rest is per token.

    A least-squares line through the passes made, older ones with exponentially falling weight (the update of means and
    covariance is that of Finch, "Incremental calculation of weighted mean and variance", 2009). Where passes hardly
    differ in size the slope stays what it was at first.

    Args:
        first: tokens and seconds of two passes or more of different sizes, made to warm up. With fewer than two,
            nothing is known, and a pass takes no time.
    """

    def __init__(self, first: Iterable[tuple[int, float]] = ()) -> None:
        passes = sorted(first)
        self._mean_tokens = self._mean_s = self._slope_s = 0.0
        if len(passes) >= 2:
            (least, least_s), (most, most_s) = passes[0], passes[-1]
            self._slope_s = max(0.0, (most_s - least_s) / (most - least))
            self._mean_tokens, self._mean_s = float(least), least_s
        self._first_slope_s = self._slope_s
        self._variance = self._covariance = 0.0

    def observe(self, num_tokens: int, elapsed_s: float) -> None:
        """Learns from a pass."""
        expected_s = self.pass_s(num_tokens)
        if expected_s:
            elapsed_s = min(elapsed_s, _OUTLIER_CAP * expected_s)
        off_tokens, off_s = num_tokens - self._mean_tokens, elapsed_s - self._mean_s
        self._mean_tokens += _EWMA_WEIGHT * off_tokens
        self._mean_s += _EWMA_WEIGHT * off_s
        self._variance = (1 - _EWMA_WEIGHT) * (self._variance + _EWMA_WEIGHT * off_tokens * off_tokens)
        self._covariance = (1 - _EWMA_WEIGHT) * (self._covariance + _EWMA_WEIGHT * off_tokens * off_s)
        known = _LEAST_VARIANCE * self._first_slope_s
        self._slope_s = max(0.0, (self._covariance + known) / (self._variance + _LEAST_VARIANCE))

    def pass_s(self, num_tokens: int) -> float:
        """Expected seconds of a pass."""
        return max(0.0, self._mean_s + (num_tokens - self._mean_tokens) * self._slope_s)

    def num_tokens_within(self, time_s: float, most: int) -> int:
        """Tokens of a pass that is over after a time, 0 to `most`."""
        if self.pass_s(most) <= time_s:
            return most
        if not self._slope_s:
            return 0
        return max(0, min(most, int(self._mean_tokens + (time_s - self._mean_s) / self._slope_s)))
