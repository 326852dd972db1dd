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
# # What is kept
# One reading of a prompt, compressed by six policies, and a picture of what each keeps: a row for every head of every
# layer, a column for every token.

# %%
# From a checkout of kvec_jax: `pip install ".[notebooks]"`; in Colab: `%pip install -q "/content/kvec_jax[notebooks]"`.
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import kvec_jax as kv

print("kvec_jax", kv.__version__, "jax", jax.__version__, jax.devices())

# %%
import pydoc_data.topics

lm = kv.load("smollm2-135m")
tokens = lm.encode(pydoc_data.topics.topics["assignment"])[:600]
policies = {
    "StreamingLLM": kv.StreamingLLM(48),
    "KNorm": kv.KNorm(48),
    "SnapKV": kv.SnapKV(48),
    "K-VEC": kv.KVec(48),
    "Ada-KV": kv.AdaKV(48),
    "LaProx": kv.LaProx(48),
}

# %% [markdown]
# `kv.sweep` reads the prompt once, however many policies there are.

# %%
_, caches = kv.sweep(lm.model, jnp.asarray([tokens]), jnp.array([len(tokens)]), list(policies.values()))
caches = dict(zip(policies, caches))


# %%
def kept(cache):
    heads = [positions for layer in cache.kept_positions(0) for positions in layer]
    mask = np.zeros((len(heads), len(tokens)), bool)
    for row, positions in zip(mask, heads):
        row[positions] = True
    return mask


figure, axes = plt.subplots(2, 3, figsize=(12, 6), layout="constrained")
for axis, (name, cache) in zip(axes.flat, caches.items()):
    axis.imshow(kept(cache), aspect="auto", cmap="Greys", interpolation="nearest")
    axis.set(title=f"{name}, coverage {kv.coverage(cache)[0]:.0%}", xlabel="token", ylabel="head, first layer on top")

# %% [markdown]
# ## How many each head keeps
# With `scope="head"` every head keeps the same number. Where heads or layers compete they don't, and yet the sum, and
# so the memory, is the same.

# %%
figure, axis = plt.subplots(figsize=(9, 3), layout="constrained")
for name in ("SnapKV", "Ada-KV", "LaProx"):
    axis.plot(np.asarray(caches[name].counts[0]).ravel(), label=name, drawstyle="steps-mid")
axis.set(xlabel="head, first layer on the left", ylabel="tokens kept")
axis.legend()
for name, cache in caches.items():
    print(f"{name:13} {int(cache.counts.sum()):6} entries  {cache.nbytes / 1e6:.2f} MB")

# %% [markdown]
# ## Which words
# The tokens that most heads keep, in order.

# %%
votes = kept(caches["K-VEC"]).sum(axis=0)
best = np.sort(np.argsort(-votes, kind="stable")[:40])
print(" ".join(lm.tokenizer.decode([tokens[i]]).strip() for i in best))
