"""Trains a zoom-in head beside a frozen model; what was interrupted goes on as if it had not been."""

import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvec_jax.arguments import check_count
from kvec_jax.models.transformer import Transformer
from kvec_jax.records import Records
from kvec_jax.sekv.head import HeadConfig, ZoomHead, save_head, values_of, with_values
from kvec_jax.sekv.lesson import make_lesson
from kvec_jax.sekv.losses import Losses, Weights, divergence, losses
from kvec_jax.sekv.plan import span_lengths
from kvec_jax.sekv.policy import SeKV
from kvec_jax.sekv.student import answer
from kvec_jax.sekv.windows import Windows
from kvec_jax.typing import Array

HEAD_FILE = "head.zoom.safetensors"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """How a head is trained.

    Attributes:
        steps: Of the optimiser.
        lengths: Tokens of the windows, the curriculum: each for an equal part of the steps.
        queries: Last tokens of each window, which are predicted from a memory of the others; at most 512.
        batch: Windows of a step.
        policy: SeKV as it will be used; its sizes are those of the memories.
        learning_rate: At its highest, after the warm-up; it then falls to 0 along a cosine.
        warmup: Share of the steps over which the learning rate rises.
        weight_decay: Of matrices, not of thresholds and biases.
        clip: Largest norm of a gradient.
        weights: Of the losses.
        every: Steps between two validations, after each of which a checkpoint is written.
        validation: Held-out windows, of the last length.
        seed: Of the first weights and of the order of the windows.
    """

    steps: int = 300
    lengths: tuple[int, ...] = (512, 768, 1024)
    queries: int = 128
    batch: int = 1
    policy: SeKV = SeKV(0.1)
    learning_rate: float = 1e-3
    warmup: float = 0.1
    weight_decay: float = 0.01
    clip: float = 1.0
    weights: Weights = Weights()
    every: int = 50
    validation: int = 8
    seed: int = 0

    def __post_init__(self):
        for name in ("steps", "queries", "batch", "every", "validation"):
            check_count(name, getattr(self, name), 1)
        check_count("seed", self.seed, 0)
        if self.queries > 512:
            raise ValueError(f"queries: expected at most 512, got {self.queries}")
        if not self.lengths:
            raise ValueError("lengths: expected at least one")
        for length in self.lengths:
            check_count("lengths", length, self.queries + 64)
        if self.policy.head is not None:
            raise ValueError("policy: expected one without a head, which is what is trained")

    def length(self, step: int) -> int:
        """Tokens of the windows of a step."""
        return self.lengths[step * len(self.lengths) // self.steps]

    def optimizer(self) -> optax.GradientTransformation:
        """AdamW with warm-up, cosine and clipping."""
        warmup = min(max(round(self.warmup * self.steps), 1), self.steps - 1)
        first = self.learning_rate / warmup  # of the first step: from 0 it would change nothing
        rate = optax.warmup_cosine_decay_schedule(first, self.learning_rate, warmup, self.steps)
        decayed = functools.partial(jax.tree_util.tree_map_with_path, lambda path, _: path[0].key in _MATRICES)
        adam = optax.adamw(rate, weight_decay=self.weight_decay, mask=decayed)
        return optax.chain(optax.clip_by_global_norm(self.clip), adam)


_MATRICES = ("route", "gate_in", "gate_mid", "gate_out")


def train(
    model: Transformer,
    windows: Windows,
    out: str | os.PathLike,
    training: Training,
    *,
    mesh: Mesh | None = None,
    provenance: dict[str, Any] | None = None,
    progress: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
) -> tuple[ZoomHead, dict[str, Any]]:
    """Trains a head, or goes on where an earlier call was interrupted.

    Args:
        model: Frozen: it gets no gradient, and is in no checkpoint.
        windows: Of text.
        out: Folder: ``metrics.jsonl``, ``checkpoints/`` (the last and the best), and in the end the best head.
        training: How.
        mesh: Devices that share the windows of a step, along its first axis.
        provenance: Plain values to be kept with the head.
        progress: Told the metrics of every step.

    Returns:
        The head with the least validation KL, and how it was made.

    Raises:
        ValueError: For a batch that the devices can't share, windows in which there is nothing to choose, or a folder
            begun with other settings.
    """
    _check_slots(model, training)
    mesh = _as_mesh(mesh, training.batch)
    held_out = windows.held_out(training.validation, training.lengths[-1])
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    config = HeadConfig.of(model.config, max_rank=training.policy.max_rank, typical_span=_typical_span(training.policy))
    blank = ZoomHead(config, rngs=nnx.Rngs(training.seed))
    told = dict(model_config=dataclasses.asdict(model.config), text=windows.describe(), **_plain(training))
    records = Records(out / "metrics.jsonl", told)
    optimizer = training.optimizer()
    values = values_of(blank)
    state = {"values": values, "optimizer": optimizer.init(values)}
    state = jax.device_put(state, None if mesh is None else NamedSharding(mesh, PartitionSpec()))
    with _Checkpoints(out / "checkpoints") as checkpoints:
        first, state = checkpoints.restore(state)
        for name, head in ("untrained", None), ("validation 0", blank):
            if name not in records:
                records.add(name, {"kl": _validate(model, head, held_out, training)})
        began = time.perf_counter()
        for step in range(first, training.steps):
            tokens = windows.batch(training.seed, step, training.batch, training.length(step))
            values, moments, found = _step(
                model, blank, state["values"], state["optimizer"], tokens, step, training, mesh
            )
            state = {"values": values, "optimizer": moments}
            metrics = {name: float(value) for name, value in found._asdict().items()}
            records.add(f"step {step + 1}", metrics)
            if (step + 1) % training.every == 0 or step + 1 == training.steps:
                metrics["validation_kl"] = _validate(model, with_values(blank, values), held_out, training)
                records.add(f"validation {step + 1}", {"kl": metrics["validation_kl"]})
                checkpoints.save(step + 1, state, metrics["validation_kl"])
            progress(step + 1, metrics)
        seconds = time.perf_counter() - began
        best, kl, state = checkpoints.best(state)
    head = with_values(blank, state["values"])
    about = (provenance or {}) | _about(training, windows, model, head, records, best, kl)
    if first < training.steps:
        about["seconds_of_last_run"] = round(seconds)
    save_head(head, out / HEAD_FILE, about)
    return head, about


@functools.partial(jax.jit, static_argnames=("training", "mesh"))
def _step(model, blank, values, moments, tokens, step, training: Training, mesh: Mesh | None):
    gradient = functools.partial(_gradient, training=training)
    if mesh is not None:
        (axis,) = mesh.axis_names
        # Every device reads its own windows; nothing but the gradient and the losses goes from one to another.
        gradient = jax.shard_map(
            lambda *arguments: lax.pmean(_gradient(*arguments, training=training), axis),
            mesh=mesh,
            in_specs=(*[PartitionSpec()] * 4, PartitionSpec(axis)),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    gradient, found = gradient(model, blank, values, jnp.minimum(2 * step / training.steps, 1), tokens)
    updates, moments = training.optimizer().update(gradient, moments, values)
    return optax.apply_updates(values, updates), moments, found


def _gradient(model, blank, values, ramp, tokens, training: Training):
    lesson = make_lesson(model, tokens, training.queries, training.policy)

    def objective(values):
        found = losses(model, with_values(blank, values), lesson, ramp, training.weights)
        return found.total, found

    return jax.grad(objective, has_aux=True)(values)


def _validate(model, head, held_out: np.ndarray, training: Training) -> float:
    """Mean KL of held-out windows, one at a time."""
    return float(np.mean([_measure(model, head, window[None], training) for window in held_out]))


@functools.partial(jax.jit, static_argnames=("training",))
def _measure(model, head, tokens: Array, training: Training) -> Array:
    lesson = make_lesson(model, tokens, training.queries, training.policy)
    return divergence(lesson.teacher, answer(model, head, lesson)[0])


def _check_slots(model: Transformer, training: Training) -> None:
    """Raises if a memory has no place for a single expanded span: whatever the head says, nothing would change."""
    for length in training.lengths:
        T = length - training.queries
        limits = training.policy.limits(model.config, np.array([T], np.int32), T, model.dtype.itemsize)
        if limits.max_slots == 0:
            share = training.policy.device_share
            raise ValueError(f"lengths: expected windows long enough that a span can be expanded; a share of {share} "
                             f"of {length} - {training.queries} tokens has room for none")  # fmt: skip


def _typical_span(policy: SeKV) -> int:
    return sum(span_lengths(policy.device_share, policy.min_span, policy.max_span)) // 2


def _as_mesh(mesh: Mesh | None, batch: int) -> Mesh | None:
    """The first axis of a mesh, whose devices share the windows of a step."""
    if mesh is None:
        return None
    axis = mesh.axis_names[0]
    if batch % mesh.shape[axis]:
        raise ValueError(f"batch: expected a multiple of {mesh.shape[axis]}, the devices that share it, got {batch}")
    return Mesh(mesh.devices.reshape(mesh.shape[axis], -1)[:, 0], (axis,))


class _Checkpoints:
    """The last and the best state of the training, by orbax."""

    def __init__(self, folder: pathlib.Path):
        import orbax.checkpoint as ocp

        policies = ocp.checkpoint_managers.preservation_policy
        keep = policies.AnyPreservationPolicy(
            [policies.LatestN(1), policies.BestN(get_metric_fn=lambda metrics: metrics["kl"], reverse=True, n=1)]
        )
        options = ocp.CheckpointManagerOptions(
            preservation_policy=keep,
            best_fn=lambda metrics: metrics["kl"],
            best_mode="min",
            enable_async_checkpointing=False,
        )
        self._ocp = ocp
        self._manager = ocp.CheckpointManager(folder.absolute(), options=options)

    def __enter__(self) -> "_Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self._manager.close()

    def save(self, step: int, state, kl: float) -> None:
        self._manager.save(step, args=self._ocp.args.StandardSave(state), metrics={"kl": kl})

    def restore(self, state) -> tuple[int, Any]:
        """Steps done and the state after them; 0 and the given state at the beginning."""
        step = self._manager.latest_step()
        return (0, state) if step is None else (step, self._read(step, state))

    def best(self, state) -> tuple[int, float, Any]:
        """Step, validation KL and state of the best."""
        step = self._manager.best_step()
        return step, self._manager.metrics(step)["kl"], self._read(step, state)

    def _read(self, step: int, state):
        shapes = jax.tree.map(self._ocp.utils.to_shape_dtype_struct, state)
        return self._manager.restore(step, args=self._ocp.args.StandardRestore(shapes))


def _plain(training: Training) -> dict[str, Any]:
    """The settings as plain values."""
    policy = {f.name: getattr(training.policy, f.name) for f in dataclasses.fields(SeKV) if f.name != "head"}
    fields = {f.name: getattr(training, f.name) for f in dataclasses.fields(Training)}
    return fields | {"policy": policy, "weights": dataclasses.asdict(training.weights)}


def _about(training, windows, model, head, records, best: int, kl: float) -> dict[str, Any]:
    from kvec_jax import __version__

    parameters = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model)))
    return dict(
        versions={"kvec_jax": __version__, "jax": jax.__version__},
        training=_plain(training),
        text=windows.describe(),
        steps=best,
        validation_kl=kl,
        first_validation_kl=records["validation 0"]["kl"],
        untrained_validation_kl=records["untrained"]["kl"],
        parameters=head.size,
        share_of_model=head.size / parameters,
    )


__all__ = ["HEAD_FILE", "Losses", "Training", "train"]
