"""Kernels for TPU (Mosaic) and GPU (Triton, Mosaic GPU), and what chooses between them and plain XLA.

Nothing here knows a policy, a model or a cache: every kernel is a function of arrays, with a plain reference in ``jnp``
beside the public operation.
"""
