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
# # TPU and GPU
# What runs where, and how to look at what the compilers make of it, with or without the chip.

# %%
# From a checkout: `pip install ".[tpu]"` on a TPU, `pip install ".[cuda]"` on an NVIDIA GPU.
import jax
import jax.numpy as jnp

import kvec_jax as kv

print("kvec_jax", kv.__version__, "jax", jax.__version__, jax.devices())

# %% [markdown]
# ## Implementations
# `None` takes the platform's kernel where it can do the case, and plain XLA elsewhere; a name takes that or fails.
# Off the chip a kernel can still be interpreted: slow, and the same steps.

# %%
lm = kv.load("smollm2-135m")
tokens = jnp.asarray([lm.encode("The password of the archive is marigold. " * 12)])
lengths = jnp.array([tokens.shape[1]])
_, plain = kv.prefill(lm.model, tokens, lengths, kv.SnapKV(48))
how = kv.Implementations(select_top_k="pallas_tpu", interpret=jax.default_backend() != "tpu")
_, kernel = kv.prefill(lm.model, tokens, lengths, kv.SnapKV(48), implementation=how)
same = all((a == b).all() for x, y in zip(plain.kept_positions(0), kernel.kept_positions(0)) for a, b in zip(x, y))
assert same
print("the kernel keeps what XLA keeps")

# %% [markdown]
# ## bfloat16
# On TPU and GPU models load in bfloat16. Scores and softmax are in float32 all the same.

# %%
print(lm.model.dtype, f"{lm.config.kv_bytes(131072, 2) / 1e9:.2f} GB of cache at 128k tokens in bfloat16")

# %% [markdown]
# ## Compiling for a chip that isn't here
# With `libtpu` installed, its compiler runs on any machine; see `docs/kernels.md`. The memory that it reports is the
# chip's.

# %%
import importlib.util

if importlib.util.find_spec("libtpu"):
    from kvec_jax.pallas.aot import compile_for

    shape = jax.ShapeDtypeStruct((1024, 1024), "bfloat16")
    print(compile_for("v5e", lambda x: x @ x, shape).memory_analysis())
else:
    print("libtpu is not installed here")
