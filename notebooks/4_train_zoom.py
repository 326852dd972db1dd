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
# # Train the zoom-in head
# SeKV keeps summaries of spans on the device and reads some of them in detail. Which ones, a small head decides; it
# is trained beside the frozen model, on any text. Here a few steps on a small model, to see that it runs; `kvec
# train-zoom --model M --text FILES --out DIR` is the command for a real one.

# %%
# From a checkout of kvec_jax: `pip install ".[notebooks]"`; in Colab: `%pip install -q "/content/kvec_jax[notebooks]"`.
import json
import pathlib

import jax

import kvec_jax as kv
from kvec_jax.sekv.training import Training, train
from kvec_jax.sekv.windows import Windows
from kvec_jax.testing import tiny_language_model

print("kvec_jax", kv.__version__, "jax", jax.__version__, jax.devices())

# %% [markdown]
# ## Text and model
# The last tenth of every text is held out. For a real run: `lm = kv.load("smollm2-135m")` and files of your own.

# %%
import pydoc_data.topics

lm = tiny_language_model(num_hidden_layers=2)
text = "\n\n".join(pydoc_data.topics.topics[name] for name in ("assignment", "import", "for", "try"))
windows = Windows([lm.encode(text)], ["Python's reference"])

# %% [markdown]
# ## Training
# The teacher is the model with full attention, the student the same model with SeKV's memory. `every` steps the
# held-out loss is measured and a checkpoint written; the same call goes on where it was interrupted.

# %%
policy = kv.SeKV(0.4, min_span=8, max_span=16)
training = Training(steps=8, lengths=(160,), queries=32, policy=policy, every=4, validation=2)
head, about = train(lm.model, windows, "zoom", training)

# %%
lines = [json.loads(line) for line in pathlib.Path("zoom/metrics.jsonl").read_text().splitlines()]
for name, result in lines[1:]:  # the first line holds the settings
    print(name, result)

# %% [markdown]
# ## Using it

# %%
answer = lm.generate(text[:600], policy=kv.SeKV(0.4, min_span=8, max_span=16, head=head), max_new_tokens=8)
print(answer.stats.cache_bytes, "bytes on the device,", answer.stats.host_bytes, "on the host")
