"""``kvec calibrate --tiers``: a profile of how many slots each layer and head is worth."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from kvec_jax.files import replacing
from kvec_jax.sampling import Greedy
from kvec_jax.tiers.decoder import read_prompts
from kvec_jax.tiers.policy import Tiered
from kvec_jax.tiers.recorder import Recorder
from kvec_jax.tiers.simulate import Trace
from kvec_jax.tiers.windows import Profile


def profile(model, prompts: list[list[int]], policy: Tiered, steps: int, name: str, progress=None) -> Profile:
    """Runs prompts and replays what they chose with every size.

    Args:
        model: The decoder.
        prompts: Token ids.
        policy: Of the runs that the profile is for; only what it chooses matters.
        steps: Tokens to write for each prompt.
        name: Of the model.
        progress: Called as ``progress(what, done, total)``.
    """
    profiles = []
    for done, ids in enumerate(prompts):
        recorder = Recorder(trace=[])
        tokens, lengths = jnp.asarray([ids], jnp.int32), jnp.asarray([len(ids)], jnp.int32)
        logits, decoder = read_prompts(model, tokens, lengths, policy, steps + 1, recorder)
        with decoder:
            state = decoder.begin(logits, Greedy(), jax.random.key(0), steps + 1, ())
            decoder.advance(state, Greedy(), jax.random.key(0), steps + 1, ())
        trace = Trace.of(recorder, decoder.layout.layers)
        provenance = dict(
            prompt_tokens=[len(x) for x in prompts],
            steps=steps,
            budget=policy.budget,
            block_tokens=policy.block_tokens,
            index=policy.index,
            eviction=policy.eviction,
            jax=jax.__version__,
        )
        profiles.append(Profile.measure(name, trace, decoder.layout.top, policy.eviction, provenance))
        if progress:
            progress("prompts", done + 1, len(prompts))
    misses = np.mean([each.misses for each in profiles], axis=0)
    return Profile(model=name, factors=profiles[0].factors, misses=np.round(misses, 4).tolist(), provenance=provenance)


def run(
    model: str,
    out: str | os.PathLike,
    *,
    tokens: int,
    prompts: int,
    steps: int,
    budget: float | int,
    text: str | None = None,
    dtype: str | None = None,
    progress=None,
) -> Profile:
    """Loads a model, makes its profile from parts of a text, and writes it.

    Args:
        model: What ``kvec_jax.load`` takes.
        out: File to write.
        tokens: Of each prompt.
        prompts: How many.
        steps: Tokens to write for each.
        budget: As in ``Tiered``.
        text: To cut prompts from; Python's language reference by default.
        dtype: Of weights and cache.
        progress: Called as ``progress(what, done, total)``.

    Raises:
        ValueError, OSError: For a text too short, a context too small, or a file that can't be written.
    """
    import kvec_jax as kv
    from kvec_jax.demo import reference_text

    if pathlib.Path(out).is_dir():
        raise ValueError(f"out: expected a file, got the folder {os.fspath(out)}")
    lm = kv.load(model, dtype=dtype)
    if tokens + steps + 1 > lm.config.max_position_embeddings:
        raise ValueError(
            f"tokens: {tokens} and {steps + 1} new ones are more than the model's {lm.config.max_position_embeddings}"
        )
    ids = lm.tokenizer.encode((reference_text() if text is None else text)[: 8 * tokens * prompts])
    if len(ids) < tokens * prompts:
        raise ValueError(f"text: expected at least {tokens * prompts:,} tokens, got {len(ids):,}")
    parts = [ids[i * tokens : (i + 1) * tokens] for i in range(prompts)]
    with replacing(out) as unfinished:  # whether it can be written is known before anything takes long
        made = profile(lm.model, parts, Tiered(budget=budget), steps, lm.name, progress)
        made.save(unfinished)
    return made
