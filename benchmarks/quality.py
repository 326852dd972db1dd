"""``kvec eval`` with combinations that no paper has: ``python -m benchmarks.quality --policies laprox-weighted ...``.

Takes the options of ``kvec eval``. What results are in ``results/quality.md`` says which commands were run.
"""

import dataclasses
import sys

import kvec_jax as kv
from kvec_jax import cli


def laprox_weighted(budget, *, calibration) -> kv.Policy:
    """LaProx's scores, each head for itself, under CompressKV's calibrated layer budgets."""
    policy = kv.LaProx(budget, scope="head")
    rule = kv.CompressKV(budget, calibration=calibration).budget
    return dataclasses.replace(policy, budget=dataclasses.replace(rule, low=max(rule.low, policy.scorer.window)))


if __name__ == "__main__":
    kv.policies.register("laprox-weighted", laprox_weighted)
    sys.exit(cli.main(["eval", *sys.argv[1:]]))
