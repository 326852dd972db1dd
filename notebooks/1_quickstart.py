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
# # Quickstart
# A long text, read once; its cache, shrunk; an answer from what is left.

# %%
# From a checkout of kvec_jax: `pip install ".[notebooks]"`, or in Colab `%pip install -q /content/kvec_jax`.
import importlib.metadata

import jax

import kvec_jax as kv

print("kvec_jax", kv.__version__, "jax", jax.__version__, "flax", importlib.metadata.version("flax"))
print(jax.devices())

# %% [markdown]
# ## A model and a text
# The first time, this downloads the model, which is small enough to try things with and often answers wrongly.
# `kvec models` lists other names; a Hugging Face id or a folder works too.

# %%
lm = kv.load("smollm2-135m")

# %%
import pydoc_data.topics

text = pydoc_data.topics.topics["assignment"] + pydoc_data.topics.topics["import"]
secret = "\n\nThe password of the archive is marigold.\n\n"
document = text[:2000] + secret + text[2000:4000]
messages = [{"role": "user", "content": document + "\n\nWhat is the password of the archive? Answer with one word."}]

# %% [markdown]
# ## Full cache and compressed cache
# `budget=64` keeps 64 tokens in every key-value head. `stats` says what that costs.

# %%
full = lm.generate(messages, max_new_tokens=12)
small = lm.generate(messages, policy=kv.SnapKV(budget=64), max_new_tokens=12)
for name, answer in {"full": full, "snapkv": small}.items():
    print(f"{name:7} {answer.stats.cache_bytes / 1e6:6.2f} MB  {answer.text!r}")

# %% [markdown]
# ## A batch
# Prompts of any lengths; each row gives what its prompt gives alone.

# %%
questions = ["What is the password of the archive?", "Of which archive is a password given?"]
batch = [[{"role": "user", "content": f"{secret}\n\n{question}"}] for question in questions]
for answer in lm.generate(batch, policy=kv.KVec(budget=48), max_new_tokens=12):
    print(repr(answer.text))

# %% [markdown]
# ## A context that is kept
# The document alone is compressed, before any question is known; then questions are asked as one batch. `save` writes
# it to one file.

# %%
book = lm.compress(document, kv.ExpectedAttention(0.5))
for answer in lm.ask(book, questions, max_new_tokens=12):
    print(repr(answer.text))

# %%
book.save("document.kv")
again = kv.load_context("document.kv", lm)
assert lm.ask(again, questions[0], max_new_tokens=12).tokens == lm.ask(book, questions[0], max_new_tokens=12).tokens

# %% [markdown]
# Compression is lossy: what was not kept is gone, and nothing warns. Measure on your own task: `kvec eval`.
