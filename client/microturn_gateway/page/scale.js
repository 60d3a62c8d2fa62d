// The scales of the chart's axes. Knows numbers only.

const NUM_STEPS = 4;

// The least of 1, 2, 2.5 and 5 times a power of ten that is no less.
export function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find((factor) => factor * power >= value * (1 - 1e-9)) * power;
}

// The values at which an axis from 0 to `most` or somewhat more is marked; the last one is its end.
export function marks(most) {
  const step = nice(most / NUM_STEPS);
  const num = Math.ceil(most / step - 1e-9);
  return Array.from({ length: num + 1 }, (_, index) => index * step);
}

// How far an axis must reach for several series, so that an outlier does not flatten the rest: three times the median
// of each series, unless all values are below.
export function robustMost(series, least) {
  const reaches = series.filter((values) => values.length > 0).map((values) => {
    const sorted = values.toSorted((one, other) => one - other);
    return Math.min(sorted.at(-1), 3 * sorted[(sorted.length - 1) >> 1]);
  });
  return Math.max(least, ...reaches);
}
