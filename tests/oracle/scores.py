"""What each method thinks of the entries of one layer, from the attention matrix of ``forward.Trace``.

A is attention [N, T, T]; "prefix" are the entries before the observation window. Functions return [K, T - w] for
methods that observe a window of w queries, [K, T] for the others.
"""

import math

import numpy as np

from tests.oracle.forward import frequencies, softmax


def group_mean(x: np.ndarray, heads: int) -> np.ndarray:
    """Mean over the query heads of each key-value head: [N, ...] to [K, ...]; query head n reads head n // G."""
    groups = len(x) // heads
    return np.stack([sum(x[h * groups + g] for g in range(groups)) / groups for h in range(heads)])


def pool(scores: np.ndarray, kernel: int, pooling: str) -> np.ndarray:
    """Pooling over the last axis, stride 1, same length; averages divide by ``kernel`` and take zeros outside."""
    out, length, half = np.empty_like(scores), scores.shape[-1], kernel // 2
    for j in range(length):
        near = scores[..., max(0, j - half) : min(length, j + half + 1)]
        out[..., j] = near.max(-1) if pooling == "max" else near.sum(-1) / kernel
    return out


def window_attention(trace, layer: int, window: int) -> np.ndarray:
    """Attention of the last ``window`` queries (fewer when the prompt is shorter), [N, w, T]."""
    return trace.attention[layer][:, -window:]


def heads_of(trace) -> int:
    """K."""
    return len(trace.keys[0])


def snapkv(trace, layer, window=32, kernel=7, pooling="max") -> np.ndarray:
    """SnapKV (https://arxiv.org/abs/2404.14469), GQA form: window mean, group mean, then pooling of the prefix."""
    A = group_mean(window_attention(trace, layer, window), heads_of(trace))
    return pool(A.mean(1)[:, :-window], kernel, pooling)


def tova(trace, layer) -> np.ndarray:
    """TOVA (https://arxiv.org/abs/2401.06104): attention of the last query, mean over all heads of the layer."""
    last = trace.attention[layer][:, -1].mean(0)
    return np.stack([last] * heads_of(trace))


def knorm(trace, layer) -> np.ndarray:
    """L2 norm of keys, small is good (https://arxiv.org/abs/2406.11430)."""
    return -np.sqrt((trace.keys[layer] ** 2).sum(-1))


def keydiff(trace, layer) -> np.ndarray:
    """KeyDiff (https://arxiv.org/abs/2504.15364): minus the cosine to the mean of the normalised keys."""
    unit = trace.keys[layer] / np.linalg.norm(trace.keys[layer], axis=-1, keepdims=True)
    anchor = unit.mean(1)
    return np.stack([-(u @ a) / np.linalg.norm(a) for u, a in zip(unit, anchor)])


def observed(trace, layer, normalize=True) -> np.ndarray:
    """Attention received from all queries (H2O-like, https://arxiv.org/abs/2306.14048).

    ``normalize`` divides by how many queries can see the entry, as kvpress does; without it this is H2O's sum.
    """
    received = trace.attention[layer].sum(1)
    if normalize:
        total = received.shape[-1]
        received = received / np.array([total - t for t in range(total)])
    return group_mean(received, heads_of(trace))


def expected_attention(trace, layer, config, sinks=4, future=512, covariance=True, use_vnorm=True, epsilon=0.0):
    """Expected Attention (https://arxiv.org/abs/2510.00636): attention of a Gaussian model of future queries.

    Mean and (biased) covariance of the queries before RoPE, without the first ``sinks`` tokens; both rotated by RoPE
    averaged over the next ``future`` positions; softmax over the entries that are no sinks. Sinks get infinity.
    """
    q = trace.raw_queries[layer][:, sinks:]
    keys, values = trace.keys[layer][:, sinks:], trace.values[layer][:, sinks:]
    total, D = trace.keys[layer].shape[1], q.shape[-1]
    R = mean_rotation(frequencies(config.rope, D), range(total, total + future))
    rows = []
    for n in range(len(q)):
        k = keys[n // (len(q) // heads_of(trace))]
        mean = R @ q[n].mean(0)
        logits = k @ mean / math.sqrt(D)
        if covariance:
            centred = q[n] - q[n].mean(0)
            S = R @ (centred.T @ centred / len(centred)) @ R.T
            logits = logits + np.array([row @ S @ row for row in k]) / (2 * D)
        rows.append(softmax(logits))
    scores = group_mean(np.stack(rows), heads_of(trace))
    if use_vnorm:
        scores = (scores + epsilon) * np.linalg.norm(values, axis=-1)
    return np.concatenate([np.full((len(scores), sinks), np.inf), scores], axis=1)


def mean_rotation(freqs: np.ndarray, positions) -> np.ndarray:
    """The matrix [D, D] of RoPE averaged over ``positions``."""
    half = len(freqs)
    R = np.zeros((2 * half, 2 * half))
    for i, f in enumerate(freqs):
        c, s = (np.mean([fn(p * f) for p in positions]) for fn in (math.cos, math.sin))
        R[i, i], R[i, i + half], R[i + half, i], R[i + half, i + half] = c, -s, s, c
    return R


def value_norms(trace, layer, order: int) -> np.ndarray:
    """Norm of v W_O per entry, explicitly, mean over the query heads of the group: [K, T]; ``order`` 1 or 2."""
    W, heads = trace.output[layer], heads_of(trace)
    groups = len(W) // heads
    norms = [np.linalg.norm(trace.values[layer][n // groups] @ W[n], ord=order, axis=-1) for n in range(len(W))]
    return group_mean(np.stack(norms), heads)


def cake(trace, layer, window=32, kernel=5, gamma=200.0) -> np.ndarray:
    """CAKE's indicator (https://arxiv.org/abs/2503.12491): mean + gamma * variance over the window's queries."""
    A = window_attention(trace, layer, window)[:, :, :-window]
    indicator = A.mean(1) + gamma * A.var(1, ddof=1)
    return pool(group_mean(indicator, heads_of(trace)), kernel, "avg")


def cake_preference(trace, layer, window=32, tau1=1.0, tau2=1.0) -> float:
    """CAKE's preference of a layer: entropy^(1/tau1) * variance^(1/tau2) of the window block over the prefix."""
    A = window_attention(trace, layer, window)[:, :, :-window]
    entropy = -(A * np.log(A + 1e-10)).sum()
    variance = A.var(1, ddof=1).sum()
    return entropy ** (1 / tau1) * variance ** (1 / tau2)


def laprox(trace, layer, window=32, kernel=7, gqa="attn_mean", pool_score=False) -> np.ndarray:
    """LaProx (https://arxiv.org/abs/2605.07234, Eq. 8-9, 12): L2 over window queries times norm of v W_O, over its sum.

    ``gqa``: ``attn_mean`` norms the group's mean attention; ``score_mean`` averages the product over the group;
    ``exact`` is the Frobenius norm of what the entry adds to the layer's output for the window's queries. Average
    pooling is of the attention's norm, or of the product with ``pool_score``; for ``exact`` always of the norm.
    """
    heads, A = heads_of(trace), window_attention(trace, layer, window)[:, :, :-window]
    W, V, groups = trace.output[layer], trace.values[layer][:, :-window], len(A) // heads_of(trace)

    def smooth(x):
        return x if pool_score else pool(x, kernel, "avg")

    if gqa == "attn_mean":
        column = np.sqrt((group_mean(A, heads) ** 2).sum(1))
        p = smooth(column) * value_norms(trace, layer, 2)[:, :-window]
    elif gqa == "score_mean":
        rows = [np.linalg.norm(V[n // groups] @ W[n], axis=-1) for n in range(len(A))]
        p = group_mean(smooth(np.sqrt((A**2).sum(1))) * np.stack(rows), heads)
    else:
        p = smooth(np.stack([_contribution(A, V[h], W, h * groups, groups) for h in range(heads)]))
    p = pool(p, kernel, "avg") if pool_score else p
    return p / p.sum()


def _contribution(A, v, W, first, groups):
    """Frobenius norm of sum over the group of a_t (v_t W_O)^T, for every prefix entry t, by forming the matrix."""
    out = []
    for t in range(A.shape[-1]):
        total = sum(np.outer(A[n, :, t], v[t] @ W[n]) for n in range(first, first + groups))
        out.append(np.linalg.norm(total))
    return np.array(out)
