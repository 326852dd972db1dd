"""How sure a mean is: intervals by drawing the examples anew."""

from typing import NamedTuple

import numpy as np

_DRAWS = 2000
_LEVEL = 0.95


class Mean(NamedTuple):
    """A mean with its 95 % interval.

    Attributes:
        mean: Of the examples.
        low: 2.5 % of the means of examples drawn anew lie below.
        high: 2.5 % lie above.
    """

    mean: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return f"{self.mean:{spec}} [{self.low:{spec}}, {self.high:{spec}}]"


def mean_of(*groups: list[float]) -> Mean:
    """The mean over groups of the groups' means; each group is drawn anew by itself.

    Args:
        *groups: Values of each group's examples; one group for a plain mean. For paired differences, the differences.

    Example:
        >>> f"{mean_of([0.0, 1.0, 1.0, 1.0]):.2f}"
        '0.75 [0.25, 1.00]'
    """
    rng = np.random.default_rng(0)  # the same interval for the same values
    draws = []
    for values in groups:
        values = np.asarray(values, np.float64)
        draws.append(values[rng.integers(len(values), size=(_DRAWS, len(values)))].mean(axis=1))
    tail = 100 * (1 - _LEVEL) / 2
    low, high = np.percentile(np.mean(draws, axis=0), [tail, 100 - tail])
    return Mean(float(np.mean([np.mean(values) for values in groups])), float(low), float(high))
