"""Every kernel at the sizes of published models: what is compiled for chips, reported on, and timed.

``tests/arg_specs.py`` has the sizes, of these and of the small cases that a machine with the chip checks as well.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

import kvec_jax as kv
from kvec_jax.pack_rows import pack_rows
from kvec_jax.pallas import window_scores_reference
from kvec_jax.prompt_attention import attend_prompt
from kvec_jax.ragged_attention import ragged_attention
from kvec_jax.scores import window_scores
from kvec_jax.select import ordered_keys, top_k_mask
from kvec_jax.value_norms import value_norms
from tests.arg_specs import BUDGETS, LENGTHS, MODELS, PROMPTS, SEGMENTS, Model, Prompt, Segments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One call of an operation.

    Attributes:
        operation: Which of ``kvec_jax.Implementations`` it is.
        size: Of what: model, and length or budget.
        function: The operation, which takes ``implementation`` and ``interpret``.
        values: Gives the arguments, random numbers; whoever only compiles traces it.
        dtype: In which it rounds.
        rows: Of keys and values that the operation is about, all heads together.
        spared: Bytes of the arguments that it need not read.
        gpu_kernels: The kernels for GPUs that can do it.
    """

    operation: str
    size: str
    function: Callable
    values: Callable[[], tuple]
    dtype: str
    rows: int
    spared: int = 0
    gpu_kernels: tuple[str, ...] = ("pallas_gpu",)

    @property
    def name(self) -> str:
        return f"{self.operation}-{self.size}"

    @property
    def arguments(self) -> tuple:
        """Shapes and types of the arguments."""
        return jax.eval_shape(self.values)

    @property
    def least_bytes(self) -> int:
        """What any implementation must read and write: arguments and results, each once."""
        results = jax.eval_shape(self.using("xla"), *self.arguments)
        return _nbytes((self.arguments, results)) - self.spared

    def using(self, implementation: str, interpret: bool = False) -> Callable:
        """The function with an implementation."""
        return functools.partial(self.function, implementation=implementation, interpret=interpret)


def cases(lengths: tuple[int, ...] = LENGTHS, budgets: tuple[int, ...] = BUDGETS) -> list[Case]:
    """The published models, at some lengths of the prompt and some budgets."""
    prompts = [(model, T) for model in MODELS for T in lengths]
    return [
        *(make(model.prompt(T)) for make in (_mean, _kvec, _norms, _best_of_heads) for model, T in prompts),
        *(_best_of_model(model, T) for model, T in prompts),
        *(_pack(model.prompt(T), budget) for model, T in prompts for budget in budgets),
        *(ragged(model.segments(budget, Q)) for model in MODELS for budget in budgets for Q in (1, 16)),
    ]


def largest_cases() -> list[Case]:
    """Of each kernel and model the largest; of the smaller ones loops go round less often, hardly more differs."""
    return cases(LENGTHS[-1:], BUDGETS[-1:])


def prompt_cases(lengths: tuple[int, ...] = LENGTHS) -> list[Case]:
    """Attention of prompts over themselves, which JAX's kernels do."""
    return [_prompt(model.prompt(T)) for model in MODELS for T in lengths]


def on_gpus(cases: list[Case]) -> list[tuple[Case, str]]:
    """Each of the cases with each kernel for GPUs that can do it."""
    return [(case, kernel) for case in cases for kernel in case.gpu_kernels]


def small_cases() -> list[Case]:
    """All kinds of shapes, small."""
    return [
        *(make(spec) for make in (_mean, _kvec, _norms, _best_of_heads, _pack) for spec in PROMPTS),
        *(ragged(spec) for spec in SEGMENTS),
    ]


def _mean(spec: Prompt) -> Case:
    """SnapKV's scores."""

    def scores(queries, positions, keys, **how):
        return window_scores(queries, positions, keys, lambda weights, _: weights.sum((0, 1)), scale=0.1, **how)

    return _case("window_scores", spec, scores, lambda: _window(spec), "mean")


def _kvec(spec: Prompt) -> Case:
    """K-VEC's: those, and what all heads together look at; the log-sum-exp is known."""

    def scores(queries, positions, keys, logsumexp, **how):
        def mean(weights, looks):
            return weights.sum((0, 1))

        def largest(weights):
            return weights.max(0)

        how |= dict(rivals=largest, logsumexp=logsumexp, scale=0.1)
        return window_scores(queries, positions, keys, mean, **how)

    def values():
        queries, positions, keys = _window(spec)
        grouped = queries.reshape(spec.B, spec.K, spec.G, spec.W, spec.D)
        known = window_scores_reference.logsumexp(grouped, positions, keys, 0.1, False)
        return queries, positions, keys, known.reshape(spec.B, spec.N, spec.W)

    return _case("window_scores", spec, scores, values, "kvec")


def _window(spec: Prompt) -> tuple:
    """The last queries of each row, their positions, and the keys."""
    positions = jnp.array(spec.lengths, jnp.int32)[:, None] - spec.W + jnp.arange(spec.W, dtype=jnp.int32)
    return _normal(0, spec.abstract("B", "N", "W", "D")), positions, _normal(1, spec.abstract("B", "K", "T", "D"))


def _norms(spec: Prompt) -> Case:
    """LaProx's."""

    def values():
        half = _normal(1, spec.abstract("K", "G", "D", "D", dtype="float32"))
        return _normal(0, spec.abstract("B", "K", "T", "D")), half @ half.swapaxes(-1, -2)

    return _case("value_norms", spec, value_norms, values)


def _best_of_heads(spec: Prompt) -> Case:
    def values():
        keys = ordered_keys(_normal(0, spec.abstract("B", "K", "T", dtype="float32")))
        return keys, jnp.full((spec.B, spec.K), min(1024, spec.T // 2), jnp.int32)

    return _case("select_top_k", spec, top_k_mask, values, "head")


def _best_of_model(model: Model, T: int) -> Case:
    """One layer's entries and the best of the layers before it, for the whole model's places at the larger budget."""
    places = model.layers * model.K * max(BUDGETS)
    spec = dataclasses.replace(model.prompt(T), T=places + model.K * T)

    def best(keys, k, rank, **how):
        return top_k_mask(keys, k, rank, **how)

    def values():
        keys = ordered_keys(_normal(0, spec.abstract("B", "T", dtype="float32")))
        rank = jax.random.permutation(jax.random.key(0), spec.T)
        return keys, jnp.full((spec.B,), places, jnp.int32), rank[None].astype(jnp.int32)

    return _case("select_top_k", spec, best, values, "model")


def _pack(spec: Prompt, budget: int = 200) -> Case:
    """The rows that are kept of a layer."""

    def values():
        rows = spec.abstract("B", spec.K * spec.T, "D")
        index = jax.random.randint(jax.random.key(2), (spec.B, spec.K * budget), 0, rows.shape[1], jnp.int32)
        return _normal(0, rows), _normal(1, rows), jnp.sort(index)

    case = _case("pack_rows", spec, pack_rows, values, f"{budget}-of")
    unread = 2 * spec.B * spec.K * max(spec.T - budget, 0) * spec.D * jnp.dtype(spec.dtype).itemsize
    return dataclasses.replace(case, rows=spec.B * spec.K * budget, spared=unread)


def _prompt(spec: Prompt) -> Case:
    def attend(queries, keys, values, lengths, **how):
        return attend_prompt(queries, keys, values, lengths, scale=0.1, **how)[0]

    def values():
        keys = spec.abstract("B", "K", "T", "D")
        queries = _normal(0, spec.abstract("B", "N", "T", "D"))
        return queries, _normal(1, keys), _normal(2, keys), jnp.array(spec.lengths, jnp.int32)

    return _case("prompt_attention", spec, attend, values)


def ragged(spec: Segments) -> Case:
    """A decoding step (Q is 1), or a question."""

    def attend(queries, cache, **how):
        return ragged_attention(queries, cache, jnp.int32(0), scale=0.1, **how)

    def values():
        queries = jax.ShapeDtypeStruct((spec.B, spec.K, spec.G * spec.Q, spec.D), spec.dtype)
        return _normal(0, queries), random_cache(spec)

    rows = sum(map(sum, spec.counts)) + spec.B * spec.K * spec.tail
    mosaic = ("mosaic_gpu",) if spec.dtype == "bfloat16" and spec.D in (64, 128, 256) else ()
    return Case(
        operation="ragged_attention",
        size=f"{spec.name}-q{spec.Q}",
        function=attend,
        values=values,
        dtype=spec.dtype,
        rows=rows,
        gpu_kernels=("pallas_gpu", *mosaic),
    )


def random_cache(spec: Segments) -> kv.CompressedKV:
    """One layer with packed segments of those lengths, and a full tail."""
    array = jax.ShapeDtypeStruct
    counts = jnp.array(spec.counts, jnp.int32)
    return kv.CompressedKV(
        keys=_normal(1, array((spec.B, spec.rows, spec.D), spec.dtype)),
        values=_normal(2, array((spec.B, spec.rows, spec.D), spec.dtype)),
        positions=jnp.broadcast_to(jnp.arange(spec.rows, dtype=jnp.int32), (spec.B, spec.rows)),
        starts=(jnp.cumsum(counts, axis=1) - counts)[:, None],
        counts=counts[:, None],
        tail_keys=_normal(3, array((1, spec.B, spec.K, spec.tail, spec.D), spec.dtype)),
        tail_values=_normal(4, array((1, spec.B, spec.K, spec.tail, spec.D), spec.dtype)),
        tail_length=jnp.full((spec.B,), spec.tail, jnp.int32),
        next_position=jnp.full((spec.B,), spec.rows + spec.tail, jnp.int32),
    )


def _normal(seed: int, like: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), like.shape, jnp.float32).astype(like.dtype)


def _case(operation: str, spec: Prompt, function: Callable, values: Callable, kind: str = "") -> Case:
    return Case(
        operation=operation,
        size=f"{kind}-{spec.name}".lstrip("-"),
        function=function,
        values=values,
        dtype=spec.dtype,
        rows=spec.B * spec.K * spec.T,
    )


def _nbytes(tree) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))
