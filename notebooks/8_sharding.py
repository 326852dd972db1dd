# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # TPU and sharding
# A model and its cache shared by several devices: a slice of a TPU, a machine with several GPUs, or, as here, a CPU
# that pretends to be eight devices. See `docs/sharding.md`.

# %%
# From a checkout: `pip install .`; on a TPU `pip install ".[tpu]"`, and without the next two lines.
import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")  # before JAX starts

import jax
import numpy as np

import kvec_jax as kv
from kvec_jax.testing import tiny_model

print("kvec_jax", kv.__version__, "jax", jax.__version__, jax.devices())

# %% [markdown]
# ## A mesh
# Rows of a batch are divided over the axis `data`, heads over `tensor`. With a real model,
# `kv.load(name, mesh=mesh)` puts each parameter where it belongs as it is read; here random weights are moved.

# %%
mesh = jax.make_mesh((2, 4), ("data", "tensor"))
one = tiny_model(num_hidden_layers=2, num_key_value_heads=4)
many = kv.shard(one, mesh)
projection = many.layers.q_proj.get_value()
print(projection.shape, "of which a device has", projection.addressable_shards[0].data.shape)

# %% [markdown]
# ## The same entries, the same tokens
# LaProx lets all heads of all layers compete for all places. Over several devices only counts are exchanged to find
# the threshold, no keys.

# %%
tokens = np.random.default_rng(0).integers(1, 255, (4, 96))
lengths = np.array([96, 50, 71, 88])
policy = kv.LaProx(budget=32, window=8)
_, alone = kv.prefill(one, tokens, lengths, policy)
_, shared = kv.prefill(many, tokens, lengths, policy)
for row in range(4):
    for mine, its in zip(alone.kept_positions(row), shared.kept_positions(row), strict=True):
        assert all((a == b).all() for a, b in zip(mine, its, strict=True))
print("each head keeps the same entries")
alone, shared = (kv.generate(model, tokens, lengths, policy, max_new_tokens=8) for model in (one, many))
assert (np.asarray(alone) == np.asarray(shared)).all()
print(np.asarray(shared), shared.sharding.spec)

# %% [markdown]
# ## Where the cache lies
# Each device has a pool with the rows of its heads. Where every head keeps the same number, that is its share exactly;
# where heads compete, it is the room that its heads may need.

# %%
for policy in (kv.SnapKV(32, window=8), kv.LaProx(32, window=8)):
    _, cache = kv.prefill(many, tokens, lengths, policy)
    piece = cache.keys.addressable_shards[0].data
    print(f"{policy.name}: keys {cache.keys.shape}, of a device {piece.shape}; {cache.nbytes:,} bytes in all")

# %% [markdown]
# ## A slice of a TPU that isn't here
# With `libtpu` installed, its compiler runs on any machine; `python -m benchmarks.aot_mesh` compiles Llama-3.1-8B for
# sixteen v5e chips and prints the memory of each.

# %%
import importlib.util

if importlib.util.find_spec("libtpu"):
    from kvec_jax.pallas.aot import mesh_of

    print(mesh_of("v5e", "4x4", (2, 8), ("data", "tensor")))
else:
    print("libtpu is not installed here")
