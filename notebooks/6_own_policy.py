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
# # Write your own policy
# A policy is a scorer, a scope and a budget. The scorer is the part that is yours: it sees one layer of a prompt and
# says how much each entry matters.

# %%
# From a checkout of kvec_jax: `pip install ".[notebooks]"`; in Colab: `%pip install -q "/content/kvec_jax[notebooks]"`.
import dataclasses

import jax
import jax.numpy as jnp

import kvec_jax as kv

print("kvec_jax", kv.__version__, "jax", jax.__version__, jax.devices())


# %% [markdown]
# ## A scorer
# Keeps entries whose values are long, and takes the attention of the last tokens into account. `window_scores`
# reduces the attention of the last queries key by key, so that nothing of prompt times prompt is ever made.


# %%
@dataclasses.dataclass(frozen=True)
class LoudValues(kv.Stateless):
    window: int = 16

    def score(self, seen, carry):
        attention = seen.window_scores(self.window, lambda weights, looks: jnp.sum(weights, axis=(0, 1)))
        return attention * jnp.linalg.norm(seen.values.astype(jnp.float32), axis=-1), carry


loud = kv.Policy(scorer=LoudValues(), budget=48, name="loud")

# %% [markdown]
# ## It runs
# In a batch of unequal prompts, under `jit`, like any other. The window is kept, padding is never chosen, ties go to
# the lower position: none of that is the scorer's business.

# %%
lm = kv.load("smollm2-135m")
prompts = ["The password of the archive is marigold. " * 8 + "The password is", "One, two, three, " * 20]
for answer in lm.generate(prompts, policy=loud, max_new_tokens=6):
    print(repr(answer.text), answer.stats.kept, "of", answer.stats.total)

# %% [markdown]
# ## The same scores, other competitions

# %%
for scope in ("head", "model"):
    policy = dataclasses.replace(loud, scope=scope)
    tokens = jnp.asarray([lm.encode(prompts[0])])
    _, cache = kv.prefill(lm.model, tokens, jnp.array([tokens.shape[1]]), policy)
    counts = cache.counts[0]
    print(f"{scope:6} {int(counts.sum())} entries, {int(counts.min())} to {int(counts.max())} in a head")

# %% [markdown]
# ## A name for the command line
# After this, `kvec eval --policies loud,snapkv` compares it, where the module that registers it was imported.

# %%
kv.policies.register("loud", lambda budget: dataclasses.replace(loud, budget=kv.Even(budget)))
assert "loud" in kv.policies.names()
