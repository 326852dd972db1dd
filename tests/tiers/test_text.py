"""Text over tiers: the same as from the full cache, with what it cost; what goes wrong ends in an error."""

import os

import kvec_jax as kv
from kvec_jax.testing import tiny_language_model

PROMPTS = ["the first prompt, which is a little longer than the other " * 4, "a short one"]


def small(**settings):
    return kv.Tiered(**(dict(recent=16, budget=1.0) | settings))


def test_text_and_what_it_cost(tmp_path):
    lm = tiny_language_model()
    full = lm.generate(PROMPTS, max_new_tokens=6, eos_token_ids=())
    told = []
    policy = small(disk=tmp_path, host_bytes=1 << 16, progress=lambda *what: told.append(what))
    tiered = lm.generate(PROMPTS, policy=policy, max_new_tokens=6, eos_token_ids=())
    for one, other in zip(full, tiered, strict=True):
        assert (one.text, one.tokens) == (other.text, other.tokens)
        assert one.stats.kept == other.stats.kept == one.stats.total
        assert one.stats.full_cache_bytes == other.stats.full_cache_bytes
    stats = tiered[0].stats
    held = stats.tier_bytes
    assert stats.hit_rate == 1.0 and held["disk"] > 0 and held["host"] <= 1 << 16
    assert (stats.host_bytes, stats.moved_bytes) == (held["host"] // 2, 0)
    assert stats.stage_seconds["step"] > 0 and stats.decode_seconds > 0 and stats.reads in ("direct", "buffered")
    assert stats.cache_bytes == (held["device"] + held["resident"]) // 2
    assert told[0] == ("storing layers", 1, 4) and told[-1] == ("writing tokens", 6, 6)
    assert os.listdir(tmp_path) == []
