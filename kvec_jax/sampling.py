"""How the next token is chosen from logits."""

import dataclasses
import math
import numbers

import jax
import jax.numpy as jnp
from jax import lax

from kvec_jax.arguments import check_count
from kvec_jax.select import ordered_keys, split_at_largest, top_k_mask
from kvec_jax.typing import Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Penalising:
    """What comes first, whatever the sampler: tokens that were written lately become less likely."""

    repetition_penalty: float | None = None
    repetition_window: int | None = dataclasses.field(default=None, metadata=dict(static=True))

    def __post_init__(self):
        if self.repetition_penalty is not None:
            _check("repetition_penalty", self.repetition_penalty, "above 0", lambda x: 0 < x < math.inf)
        if self.repetition_window is not None:
            check_count("repetition_window", self.repetition_window, 1)
            if self.repetition_penalty is None:
                raise ValueError("repetition_window: needs a repetition_penalty, such as 1.1")

    def penalise(self, logits: Array, written: Array, count: Array | int) -> Array:
        """Logits float32 [B, V] as the sampler wants them.

        ``written`` int32 [B, S] holds the ``count`` tokens so far, and each row's newest in all other places.
        """
        if self.repetition_penalty is None:
            return logits
        window = min(self.repetition_window or written.shape[1], written.shape[1])
        newest = lax.dynamic_slice_in_dim(written, jnp.maximum(count - window, 0), window, axis=1)
        rows = jnp.arange(logits.shape[0])[:, None]
        known = jnp.zeros(logits.shape, bool).at[rows, newest].set(True)
        less = jnp.where(logits > 0, logits / self.repetition_penalty, logits * self.repetition_penalty)
        return jnp.where(known, less, logits)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Greedy(_Penalising):
    """The most likely token; of equal ones the lowest id.

    Args:
        repetition_penalty: As of ``Sample``.
        repetition_window: As of ``Sample``.

    Raises:
        ValueError: For a number out of its range.

    Example:
        >>> Greedy()(jnp.array([[0.0, 2.0, 2.0]]), None).tolist()
        [1]
    """

    def __call__(self, logits: Array, keys: Array | None) -> Array:
        """Tokens int32 [B] from logits [B, V], after ``penalise``; the keys are not used."""
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample(_Penalising):
    """Draws from the model's distribution, after Hugging Face's steps in their order, which is that of the arguments.

    The numbers are arrays to ``jit``: changing them does not compile again.

    Args:
        repetition_penalty: Divides the logits above 0 of tokens that were written, and multiplies those below (CTRL,
            https://arxiv.org/abs/1909.05858, section 4.1); ``None`` or 1 changes nothing, 1.1 keeps small models from
            going round in circles. The prompt's tokens don't count, as an answer needs its words.
        repetition_window: How many of the tokens written last are penalised; static. ``None`` means all, which leaves
            a long text without its commonest words; 256 suits texts of any length.
        temperature: Divides the logits; above 0.
        top_k: Keeps the k most likely tokens; 0 keeps all.
        top_p: Keeps the most likely tokens up to this share of the probability, the token that crosses it included.
        min_p: Keeps tokens at least this likely, as a share of the most likely one's probability.

    Raises:
        ValueError: For a number out of its range.

    Example:
        >>> keys = jax.random.split(jax.random.key(0), 1)
        >>> Sample(top_k=1)(jnp.array([[0.0, 5.0, 1.0]]), keys).tolist()
        [1]
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        _check("temperature", self.temperature, "above 0", lambda x: x > 0)
        _check("top_k", self.top_k, "a whole number, 0 or more", lambda x: x >= 0 and x == int(x))
        _check("top_p", self.top_p, "in (0, 1]", lambda x: 0 < x <= 1)
        _check("min_p", self.min_p, "in [0, 1]", lambda x: 0 <= x <= 1)

    def __call__(self, logits: Array, keys: Array) -> Array:
        """Tokens int32 [B] from logits float32 [B, V], after ``penalise``, and one random key per row, ``keys`` [B]."""
        filtered = self.filter(logits)
        return jax.vmap(jax.random.categorical)(keys, filtered).astype(jnp.int32)

    def filter(self, logits: Array) -> Array:
        """The logits [B, V] divided by the temperature, with -inf for the tokens that the filters take out."""
        logits = logits.astype(jnp.float32) / self.temperature
        V = logits.shape[-1]
        k = jnp.where(self.top_k > 0, self.top_k, V)
        logits = jnp.where(top_k_mask(ordered_keys(logits), k, implementation="xla"), logits, -jnp.inf)
        probabilities = jax.nn.softmax(logits, axis=-1)
        logits = jnp.where(_nucleus(probabilities, self.top_p), logits, -jnp.inf)
        floor = self.min_p * jnp.max(probabilities, axis=-1, keepdims=True)
        return jnp.where(probabilities >= floor, logits, -jnp.inf)


def _nucleus(probabilities: Array, top_p: Array | float) -> Array:
    """Marks the smallest set of most likely tokens that holds ``top_p``; tokens as likely as its last are all in it.

    The threshold is found as in ``top_k_mask``, with sums of probabilities in place of counts: no sort.
    """
    goal = jnp.minimum(top_p, jnp.sum(probabilities, axis=-1))

    def enough(marked):
        return jnp.sum(jnp.where(marked, probabilities, 0.0), axis=-1) >= goal

    above, equal = split_at_largest(ordered_keys(probabilities), enough)
    return jnp.where(top_p < 1, above | equal, True)


def _check(name: str, value, expected: str, good) -> None:
    # Leaves are arrays or tracers when JAX rebuilds the object; those were checked when a user made it.
    wrong_type = value is None or isinstance(value, str)
    if wrong_type or (isinstance(value, numbers.Real) and not good(value)):
        raise ValueError(f"{name}: expected {expected}, got {value!r}")


def keys_of_rows(key: Array, rows: int) -> Array:
    """One random key for each row of a batch, from one for all of them."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(rows))


Sampler = Greedy | Sample
