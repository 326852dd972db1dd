"""Which model something belongs to: its configuration, and a fingerprint of its weights."""

import dataclasses
import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from kvec_jax.models.transformer import Transformer
from kvec_jax.placement import whole
from kvec_jax.typing import Array

# What a model may differ in and still read the caches of another.
_IRRELEVANT = ("max_position_embeddings", "eos_token_ids")
# Numbers of each parameter that the fingerprint looks at.
_SAMPLED = 512


@dataclasses.dataclass(frozen=True)
class ModelIdentity:
    """What tells one model from another.

    Attributes:
        name: What was loaded; for show.
        dtype: Of weights and cache.
        config: SHA-256 of the configuration, without the length of the context and the end tokens.
        weights: SHA-256 of numbers from all over the weights.
    """

    name: str
    dtype: str
    config: str
    weights: str

    def check(self, other: "ModelIdentity") -> None:
        """Raises a ``ValueError`` unless ``other`` is the same model; it says what differs."""
        if self.config != other.config:
            raise ValueError(f"made with the model {self.name!r}, whose layers have other shapes than {other.name!r}")
        if self.dtype != other.dtype:
            raise ValueError(f"made in {self.dtype}, and the model is in {other.dtype}: load it with that dtype")
        if self.weights != other.weights:
            raise ValueError(f"made with the model {self.name!r}, which had other weights than {other.name!r}")


def identity_of(model: Transformer, name: str) -> ModelIdentity:
    """The identity of a ``model``, which goes by a ``name``.

    Example:
        >>> from kvec_jax.testing import tiny_model
        >>> identity_of(tiny_model(), "tiny") == identity_of(tiny_model(seed=1), "tiny")
        False
    """
    config = {key: value for key, value in dataclasses.asdict(model.config).items() if key not in _IRRELEVANT}
    return ModelIdentity(
        name=name,
        dtype=str(jnp.dtype(model.dtype)),
        config=hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        weights=_fingerprint(model),
    )


def _fingerprint(model: Transformer) -> str:
    values = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(nnx.state(model))}
    digest = hashlib.sha256()
    for name, sample in sorted(jax.tree.map(whole, _samples(values)).items()):
        digest.update(f"{name} {sample.dtype} {values[name].shape}".encode() + np.ascontiguousarray(sample).tobytes())
    return digest.hexdigest()


@jax.jit
def _samples(values: dict[str, Array]) -> dict[str, Array]:
    """Some hundred numbers of each array, evenly spread over all axes together."""

    def sample(value):
        places = np.linspace(0, value.size - 1, min(_SAMPLED, value.size)).astype(np.int64)
        return value[tuple(jnp.asarray(index, jnp.int32) for index in np.unravel_index(places, value.shape))]

    return jax.tree.map(sample, values)
