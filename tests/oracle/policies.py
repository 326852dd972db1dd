"""Which prompt positions each method keeps: ``kept[layer][head]``, a sorted integer array.

Every function takes the ``forward.Trace`` of one unpadded prompt and a budget (tokens per key-value head, or a share
of the prompt), window and sinks inside. Equal scores go to the lower (layer, head, position). Where a paper leaves a
choice, the one here is the docstring's.
"""

import numpy as np

from tests.oracle import budgets, scores
from tests.oracle.scores import heads_of


def top(values, count: int) -> np.ndarray:
    """Sorted positions of the ``count`` largest of ``values`` [T]; equal values: lower position first."""
    order = sorted(range(len(values)), key=lambda t: (-values[t], t))
    return np.array(sorted(order[: max(count, 0)]), int)


def everything(trace) -> list:
    """All positions, for every layer and head."""
    total = trace.keys[0].shape[1]
    return [[np.arange(total)] * heads_of(trace) for _ in trace.keys]


def with_window(chosen, total: int, window: int) -> np.ndarray:
    """Prefix positions and the last ``window`` tokens."""
    return np.concatenate([chosen, np.arange(max(total - window, 0), total)]).astype(int)


def per_head(trace, budget, score, window=0) -> list:
    """Each head keeps the window and its best prefix entries by ``score(layer)``; ``budget`` may be a list by layer."""
    total, layers = trace.keys[0].shape[1], len(trace.keys)
    each = budget if isinstance(budget, list) else [budgets.tokens(budget, total)] * layers
    kept = []
    for layer, count in enumerate(each):
        if count >= total:
            kept.append([np.arange(total)] * heads_of(trace))
        elif count <= window:
            kept.append([np.arange(total - count, total)] * heads_of(trace))
        else:
            kept.append([with_window(top(row, count - window), total, window) for row in score(layer)])
    return kept


def streaming_llm(trace, budget, sinks=4) -> list:
    """StreamingLLM (https://arxiv.org/abs/2309.17453): the first ``sinks`` tokens and the newest."""
    total = trace.keys[0].shape[1]
    count = budgets.tokens(budget, total)
    first = min(sinks, count)
    positions = np.concatenate([np.arange(first), np.arange(total - (count - first), total)])
    return [[positions] * heads_of(trace) for _ in trace.keys]


def snapkv(trace, budget, window=32, kernel=7, pooling="max") -> list:
    """SnapKV, group mean before pooling; pooling over the prefix only."""
    return per_head(trace, budget, lambda i: scores.snapkv(trace, i, window, kernel, pooling), window)


def pyramidkv(trace, budget, window=32, kernel=7, pooling="max", rule=budgets.pyramid) -> list:
    """SnapKV's scores, layer budgets by ``rule``."""
    total = trace.keys[0].shape[1]
    count = budgets.tokens(budget, total)
    if count >= total:
        return everything(trace)
    each = rule(count, window, len(trace.keys), total)
    return per_head(trace, each, lambda i: scores.snapkv(trace, i, window, kernel, pooling), window)


def layer_scope(trace, budget, score, window=0, floor=0.0) -> list:
    """All heads of a layer compete for K * (B - window) places; each head's best ``floor`` * (B - window) are safe."""
    total = trace.keys[0].shape[1]
    count = budgets.tokens(budget, total)
    if count >= total:
        return everything(trace)
    kept = []
    for layer in range(len(trace.keys)):
        if count <= window:
            kept.append([np.arange(total - count, total)] * heads_of(trace))
            continue
        s = np.array(score(layer), float)
        for row in s:
            row[top(row, int(floor * (count - window)))] = np.inf
        flat = top(s.reshape(-1), len(s) * (count - window))
        kept.append([with_window(flat[flat // s.shape[1] == h] % s.shape[1], total, window) for h in range(len(s))])
    return kept


def adakv(trace, budget, window=32, kernel=7, pooling="max", uniform=0.2) -> list:
    """Ada-KV over SnapKV scores: the layer's counts mixed with a uniform share, then each head's best."""
    total = trace.keys[0].shape[1]
    count = budgets.tokens(budget, total)
    if count >= total:
        return everything(trace)
    kept = []
    for layer in range(len(trace.keys)):
        s = scores.snapkv(trace, layer, window, kernel, pooling)
        places = budgets.adakv(s, count - window, uniform)
        kept.append([with_window(top(row, n), total, window) for row, n in zip(s, places)])
    return kept


def criticalkv(trace, budget, window=32, kernel=7, pooling="max", first=0.5, epsilon=1e-4, counts=None) -> list:
    """CriticalKV (https://arxiv.org/abs/2502.03805): half by score, the rest by (score + epsilon) * |v W_O|_1.

    The first stage takes ``first`` of the whole budget, window inside. ``counts[layer][head]``, window inside, replace
    the budget (Critical Ada-KV).
    """
    total = trace.keys[0].shape[1]
    count = budgets.tokens(budget, total)
    if count >= total:
        return everything(trace)
    kept = []
    for layer in range(len(trace.keys)):
        s = scores.snapkv(trace, layer, window, kernel, pooling)
        second = (s + epsilon) * scores.value_norms(trace, layer, 1)[:, : total - window]
        heads = []
        for h, row in enumerate(second):
            n = counts[layer][h] if counts else count
            row[top(s[h], int(first * n) - window)] = np.inf
            heads.append(with_window(top(row, n - window), total, window))
        kept.append(heads)
    return kept


def critical_adakv(trace, budget, window=32, kernel=7, pooling="max", first=0.5, heads=adakv) -> list:
    """CriticalKV's two stages with Ada-KV's head budgets; ``heads`` is the oracle that gives them."""
    counts = [[len(p) for p in layer] for layer in heads(trace, budget, window, kernel, pooling)]
    return criticalkv(trace, budget, window, kernel, pooling, first, counts=counts)


def cake(trace, budget, window=32, kernel=5, gamma=200.0, tau1=1.0, tau2=1.0) -> list:
    """CAKE: layer budgets by preference, one count for all heads of a layer."""
    total, layers = trace.keys[0].shape[1], len(trace.keys)
    count = budgets.tokens(budget, total)
    if count >= total:
        return everything(trace)
    preference = [scores.cake_preference(trace, i, window, tau1, tau2) for i in range(layers)]
    places = (count - window) * layers
    each = budgets.capped(np.array(preference) / sum(preference) * places, places, total - window)
    return per_head(trace, [n + window for n in each], lambda i: scores.cake(trace, i, window, kernel, gamma), window)


def tova(trace, budget) -> list:
    """TOVA; the last token always stays."""
    return per_head(trace, budget, lambda i: scores.tova(trace, i)[:, :-1], window=1)


def kvec(trace, budget, window=16, extended_window=32, unfocused=3, novelty=1.0, forced=0.25, kernel=7):
    """K-VEC (https://arxiv.org/abs/2606.29563), Eq. 8-16; also returns the count n [T'] after each layer.

    Choices: heads are key-value heads, attention is averaged over a group first; P is max-pooled, the focus is not; the
    deviation is taken before pooling; the last ``window`` tokens are pinned inside the budget.
    """
    total = trace.keys[0].shape[1]
    count = budgets.tokens(budget, total)
    if count >= total:
        return everything(trace), []
    if count <= window:
        return per_head(trace, budget, None, window), []
    prefix, places = total - window, count - window
    n, kept, history = np.zeros(prefix, int), [], []
    for layer in range(len(trace.keys)):
        A = scores.group_mean(scores.window_attention(trace, layer, extended_window), heads_of(trace))
        base = A[:, -window:].mean(1)[:, :prefix]
        wide = A.mean(1)[:, :prefix]
        replaced = top(-base.std(1), min(unfocused, len(base)))
        mixed = base.copy()
        mixed[replaced] = wide[replaced]
        P = scores.pool(mixed, kernel, "max")
        importance = A[:, -window:].max(0).mean(0)[:prefix]
        focused = P + novelty * importance * (1 - n / (layer + 1))
        chosen = []
        for row, adjusted in zip(P, focused):
            adjusted[top(row, min(int(forced * count), places))] = np.inf
            chosen.append(top(adjusted, places))
        for t in range(prefix):
            n[t] += any(t in c for c in chosen)
        kept.append([with_window(c, total, window) for c in chosen])
        history.append(n.copy())
    return kept, history


def laprox(trace, budget, window=32, kernel=7, gqa="attn_mean", pool_score=False) -> list:
    """LaProx, deferred: all layers' normalised scores together, one top-K of L * K * (B - window)."""
    total, layers = trace.keys[0].shape[1], len(trace.keys)
    count = budgets.tokens(budget, total)
    if count >= total:
        return everything(trace)
    if count <= window:
        return per_head(trace, budget, None, window)
    s = np.stack([scores.laprox(trace, i, window, kernel, gqa, pool_score) for i in range(layers)])
    return model_scope(s, count, window, total)


def model_scope(s: np.ndarray, count: int, window: int, total: int) -> list:
    """One top-K over scores [L, K, T - window]; then the window."""
    layers, heads, prefix = s.shape
    flat = top(s.reshape(-1), layers * heads * (count - window))
    owner, position = flat // prefix, flat % prefix
    return [[with_window(position[owner == i * heads + h], total, window) for h in range(heads)] for i in range(layers)]


def compresskv(trace, layer_budgets, head_ids, window=8, kernel=5) -> list:
    """CompressKV: the mean over a layer's semantic retrieval heads decides for all key-value heads alike."""
    total = trace.keys[0].shape[1]

    def score(layer):
        A = scores.window_attention(trace, layer, window)[head_ids[layer]]
        one = scores.pool(A.sum(1)[:, :-window], kernel, "avg").mean(0)
        return np.stack([one] * heads_of(trace))

    return per_head(trace, [min(b, total) for b in layer_budgets], score, window)
