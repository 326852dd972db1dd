"""Steps over tiers attend to what the formulas say, wherever it lies."""

import numpy as np

from tests.tiers.runs import expected, run, tiered


def test_whole_budget_is_full_attention():
    logits, _ = run(tiered(budget=1.0), 4)
    for row in range(4):
        np.testing.assert_allclose(logits[row], expected(row, 4), atol=2e-4)
