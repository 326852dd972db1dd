"""Axis letters and shared type aliases.

Every shape in this project is written with these letters, in docstrings, comments and einsums:

==========  =====================================================
``B``       batch
``T``       prompt length, padded
``W``       observation window: the last tokens of the prompt
``N``       query heads
``K``       key-value heads
``G``       query heads per key-value head, ``N / K``; query head ``n`` reads key-value head ``n // G``
``D``       head size
``M``       model width
``L``       layers
``P``       pool rows of the packed cache
``R``       tail rows of the packed cache
``Q``       new tokens in a step
``V``       vocabulary
==========  =====================================================
"""

from typing import Literal

import jax

Array = jax.Array

# How an operation is carried out. ``None`` picks the best that supports the case.
Implementation = Literal["xla", "pallas_tpu", "pallas_gpu", "mosaic_gpu"] | None
