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
# # Tiers
# `kv.Tiered` drops nothing. The whole cache lies in host memory or on disk; a small part of it, the blocks that were
# chosen lately, is on the device. Each step attends to the blocks that score best by their mean keys.

# %%
# From a checkout of kvec_jax: `pip install ".[notebooks]"`; in Colab: `%pip install -q "/content/kvec_jax[notebooks]"`.
import tempfile

import jax

import kvec_jax as kv

print("kvec_jax", kv.__version__, "jax", jax.__version__, jax.devices())

# %%
import pydoc_data.topics

lm = kv.load("smollm2-135m")
text = pydoc_data.topics.topics["assignment"]
prompt = "The password of the archive is marigold.\n\n" + text[:2500] + "\n\nThe password of the archive is"
cache_bytes = lm.config.kv_bytes(len(lm.encode(prompt)), lm.model.dtype.itemsize)

# %% [markdown]
# ## A sixteenth of the cache on the device, a quarter in memory, all of it on disk

# %%
with tempfile.TemporaryDirectory() as folder:
    policy = kv.Tiered(
        budget=0.03,
        device_bytes=cache_bytes // 16,
        host_bytes=cache_bytes // 4,
        disk=folder,
        recent=32,
    )
    answer = lm.generate(prompt, policy=policy, max_new_tokens=8)
print(repr(answer.text))

# %%
stats = answer.stats
print(f"{stats.hit_rate:.0%} of the chosen blocks were on the device")
print(f"{stats.fetched_bytes_per_step / 1e3:.0f} kB fetched in a step")
print({tier: f"{size / 1e6:.2f} MB" for tier, size in stats.tier_bytes.items()})
print({stage: f"{seconds * 1e3:.1f} ms" for stage, seconds in stats.stage_seconds.items()})

# %% [markdown]
# ## Where it lies changes times, not results
# With `deterministic=True` the tokens are the same to the bit, whatever the tiers. With `budget=1.0` attention is
# that of the full cache.

# %%
few = lm.generate(
    prompt,
    policy=kv.Tiered(budget=0.03, deterministic=True, device_bytes=cache_bytes // 16, recent=32),
    max_new_tokens=8,
)
many = lm.generate(
    prompt, policy=kv.Tiered(budget=0.03, deterministic=True, device_bytes=cache_bytes, recent=32), max_new_tokens=8
)
assert few.tokens == many.tokens
print(few.stats.hit_rate, many.stats.hit_rate)

# %% [markdown]
# `kvec bench tiers` compares fetching first with fetching meanwhile, and draws the timeline of a step.
