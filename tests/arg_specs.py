"""Shapes that every implementation of an operation must master: for its suite, the compile checks and the reports.

B batch, K key-value heads, G query heads of each, D head size, T prompt length, W window.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """Keys and values of a batch of prompts, and the queries that look at them.

    ``lengths`` has one number for each row of the batch, from 1 to T.
    """

    name: str
    K: int
    G: int
    D: int
    T: int
    lengths: tuple[int, ...]
    W: int = 8
    dtype: str = "float32"

    @property
    def B(self) -> int:
        return len(self.lengths)

    @property
    def N(self) -> int:
        return self.K * self.G

    def abstract(self, *axes: str | int, dtype=None) -> jax.ShapeDtypeStruct:
        """An array with the named axes, for compiling: ``spec.abstract("B", "K", "T", "D")``."""
        shape = tuple(axis if isinstance(axis, int) else getattr(self, axis) for axis in axes)
        return jax.ShapeDtypeStruct(shape, dtype or self.dtype)

    def normal(self, seed: int, *axes: str | int, dtype=None) -> jax.Array:
        """Random numbers with the named axes; the same for the same seed."""
        shape = self.abstract(*axes).shape
        numbers = np.random.default_rng([seed, *shape]).normal(size=shape)
        return jnp.asarray(numbers, jnp.float32).astype(dtype or self.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segments:
    """Packed rows of one layer: ``counts[row of the batch][key-value head]`` of them, Q new tokens that look."""

    name: str
    G: int
    D: int
    counts: tuple[tuple[int, ...], ...]
    Q: int = 1
    tail: int = 0
    dtype: str = "float32"

    @property
    def B(self) -> int:
        return len(self.counts)

    @property
    def K(self) -> int:
        return len(self.counts[0])

    @property
    def N(self) -> int:
        return self.K * self.G

    @property
    def rows(self) -> int:
        """P: the most rows that one row of the batch has."""
        return max(map(sum, self.counts))


# Every group size and head size, lengths that no block divides, both types; small, for every commit.
PROMPTS = (
    Prompt(name="g1", K=2, G=1, D=64, T=37, lengths=(37, 20)),
    Prompt(name="g3", K=1, G=3, D=80, T=150, lengths=(150,)),
    Prompt(name="g4", K=2, G=4, D=64, T=300, lengths=(300, 3), W=16),
    Prompt(name="g7", K=1, G=7, D=128, T=133, lengths=(129,), dtype="bfloat16"),
    Prompt(name="g8", K=1, G=8, D=256, T=65, lengths=(65,), W=5),
    Prompt(name="one-token", K=2, G=2, D=64, T=1, lengths=(1,), W=1),
)

# All of G x D x dtype, and prompts of several blocks; slow.
WIDE_PROMPTS = tuple(
    Prompt(name=f"g{G}-d{D}-{dtype}", K=2, G=G, D=D, T=1111, lengths=(1111, 700, 2), W=32, dtype=dtype)
    for G in (1, 3, 4, 7, 8)
    for D in (64, 80, 128, 256)
    for dtype in ("float32", "bfloat16")
)

# Segments of all kinds: empty, of one row, longer than a block, all of a batch's row empty.
SEGMENTS = (
    Segments(name="g1", G=1, D=64, counts=((5, 0, 130), (0, 0, 0))),
    Segments(name="g3", G=3, D=64, counts=((1, 17), (200, 3)), Q=4, tail=5),
    Segments(name="g4", G=4, D=128, counts=((300, 1),), tail=130, dtype="bfloat16"),
    Segments(name="g7", G=7, D=80, counts=((64, 65),), Q=2),
    Segments(name="g8", G=8, D=256, counts=((40,), (0,)), tail=1),
)

WIDE_SEGMENTS = tuple(
    Segments(name=f"g{G}-d{D}-{dtype}", G=G, D=D, counts=((0, 1, 600), (257, 16, 15)), Q=Q, tail=70, dtype=dtype)
    for G, Q in ((1, 1), (3, 5), (4, 1), (7, 2), (8, 16))
    for D in (64, 80, 128, 256)
    for dtype in ("float32", "bfloat16")
)


@dataclasses.dataclass(frozen=True)
class Model:
    """Heads of a published model."""

    name: str
    layers: int
    N: int
    K: int
    D: int

    def prompt(self, T: int, W: int = 32, dtype: str = "bfloat16") -> Prompt:
        """A single prompt of T tokens."""
        return Prompt(
            name=f"{self.name}-{T // 1024}k",
            K=self.K,
            G=self.N // self.K,
            D=self.D,
            T=T,
            lengths=(T,),
            W=W,
            dtype=dtype,
        )

    def segments(self, budget: int, Q: int = 1, tail: int = 128, dtype: str = "bfloat16") -> Segments:
        """``budget`` rows for every head."""
        return Segments(
            name=f"{self.name}-{budget}",
            G=self.N // self.K,
            D=self.D,
            counts=((budget,) * self.K,),
            Q=Q,
            tail=tail,
            dtype=dtype,
        )


MODELS = (
    Model("smollm2-135m", 30, 9, 3, 64),
    Model("qwen2.5-0.5b", 24, 14, 2, 64),
    Model("llama-3.1-8b", 32, 32, 8, 128),
    Model("qwen3-8b", 36, 32, 8, 128),
    Model("gemma3-1b", 26, 4, 1, 256),
)
LENGTHS = (8192, 32768, 131072)
BUDGETS = (256, 1024)

# Largest difference allowed between implementations of one operation, relative to the largest number expected.
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def ids(spec) -> str:
    """For ``pytest.mark.parametrize(..., ids=ids)``."""
    return getattr(spec, "name", str(spec))
