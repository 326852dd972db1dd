"""Evaluation: which policy, at which budget, on which task, and at what cost; see ``kvec_jax.evals.run.evaluate``."""
