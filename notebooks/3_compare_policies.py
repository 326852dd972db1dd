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
# # Compare policies
# Which policy answers best at which budget? `kvec eval` is the command; this is the same from Python, on something
# small. For numbers to rely on, take more examples and longer prompts.

# %%
# From a checkout of kvec_jax: `pip install ".[notebooks]"`; in Colab: `%pip install -q "/content/kvec_jax[notebooks]"`.
import jax

import kvec_jax as kv
from kvec_jax.calibrate.settings import Text
from kvec_jax.evals.report import write_report
from kvec_jax.evals.run import evaluate
from kvec_jax.evals.settings import Settings
from kvec_jax.evals.tasks import make_tasks
from kvec_jax.evals.trials import make_trials

print("kvec_jax", kv.__version__, "jax", jax.__version__, jax.devices())

# %% [markdown]
# ## Tasks
# A needle is hidden in a text (here Python's language reference) at several depths; `text` compares the next tokens'
# distributions with those of the full cache.

# %%
lm = kv.load("smollm2-135m")
tasks = make_tasks(["needle", "text"], lm.tokenizer, Text.reference(), lengths=[400], examples=2, seed=0)
print(tasks[0].examples[0].question)

# %% [markdown]
# ## Policies
# Written as on the command line: a name, then settings after colons.

# %%
trials = make_trials(["full", "streaming", "kvec"], [48], "smollm2-135m")
evaluate(lm, "comparison", tasks, trials, Settings(protocols=("aware",)), progress=print)

# %% [markdown]
# What was run is not run again: another policy is added to the same folder.

# %%
more = make_trials(["knorm"], [48], "smollm2-135m")
evaluate(lm, "comparison", tasks, [*trials, *more], Settings(protocols=("aware",)))

# %%
from IPython.display import Image, Markdown, display

files = write_report("comparison")
display(Markdown(open("comparison/report.md").read()))
for file in files:
    if file.suffix == ".png" and "score" in file.name:
        display(Image(str(file)))

# %% [markdown]
# The intervals are 95 % bootstrap intervals over examples. With two examples they are wide, and say so.
