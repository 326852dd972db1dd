"""SeKV from its formulas, slowly, one prompt and one head at a time, in float64 numpy."""

import numpy as np


def surprisals(logits, tokens):
    """-ln p of each token given those before, from logits [T, V]; 0 for the first."""
    logits = np.asarray(logits, np.float64)
    top = logits.max(axis=-1)
    norm = top + np.log(np.exp(logits - top[:, None]).sum(axis=-1))
    return np.array([0.0] + [norm[t - 1] - logits[t - 1, tokens[t]] for t in range(1, len(tokens))])


def segment(surprisal, window, sinks, anchors, min_span, max_span, alpha=1.0):
    """Exact positions, and the spans as lists of positions."""
    T = len(surprisal)
    known = surprisal[1:] if T > 1 else np.zeros(1)
    theta = known.mean() + alpha * known.std()
    always = {t for t in range(T) if t < sinks or t >= T - window}
    peaks = {t for t in range(T) if surprisal[t] > theta}
    chosen = sorted(peaks - always, key=lambda t: (-surprisal[t], t))[:anchors]
    exact = always | set(chosen)
    spans, run = [], []
    for t in range(T):
        if t in exact:
            continue
        new_run = t in peaks or (t - 1) in exact
        if (len(run) >= min_span and new_run) or len(run) == max_span:
            spans.append(run)
            run = []
        run = [*run, t]
    return sorted(exact), spans + ([run] if run else [])


def attend(query, keys, values, exact, spans, weights, opened, scale):
    """Output of one softmax over exact rows, the rows of opened spans, and summaries of the others.

    ``weights`` are the surprisals of all positions; ``query`` [D], ``keys`` and ``values`` [T, D].
    """
    logits, rows = [], []
    for t in exact:
        logits.append(query @ keys[t] * scale)
        rows.append(values[t])
    for number, span in enumerate(spans):
        if number in opened:
            logits += [query @ keys[t] * scale for t in span]
            rows += [values[t] for t in span]
            continue
        share = weights[span] / weights[span].sum() if weights[span].sum() else np.full(len(span), 1 / len(span))
        logits.append(query @ (share @ keys[span]) * scale + np.log(len(span)))
        rows.append(share @ values[span])
    logits = np.array(logits)
    probabilities = np.exp(logits - logits.max())
    return probabilities @ np.array(rows) / probabilities.sum()


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def rank_gates(values, singular, mean, rank):
    """Of one span: how much of each singular value [R] counts."""
    if not rank:
        return np.zeros(len(singular))
    spectrum = np.where(np.arange(len(singular)) < rank, singular, 0) / (singular[0] + 1e-8)
    x = np.concatenate([spectrum, mean / np.linalg.norm(mean)])
    for name in ("gate_in", "gate_mid"):
        x = x @ values[name] + values[f"{name}_bias"]
        x = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    gates = sigmoid(x @ values["gate_out"] + values["gate_out_bias"])
    return np.where(np.arange(len(gates)) < rank, gates, 0)


def student(values, layer, queries, exact_keys, exact_values, key_factors, value_factors, span_of, ranks, slots, scale,
            frozen=None, coverage=0.9, positive=10, temperature=0.5):  # fmt: skip
    """What one layer of the student does with one prompt, ``queries`` [N, Q, D].

    ``frozen`` are decisions and scores of another head: the decisions are then these, plus what sigmoids have changed.

    Returns: outputs [N, Q, D], logarithms of sums [N, Q], mean losses of the decisions, mean wish, (decisions, scores).
    """
    N, Q, D = queries.shape
    K, S = exact_keys.shape[0], len(ranks)
    G = N // K
    route, threshold = values["route"][layer], values["threshold"][layer]
    spans = [np.flatnonzero(span_of == s) for s in range(S)]
    spans = [s for s in spans if len(s)]
    exact = span_of < 0
    scores = np.zeros((N, Q, len(spans)))
    for n in range(N):
        for q in range(Q):
            for s, span in enumerate(spans):
                mean = route[n] @ key_factors.mean[n // G, s]
                similarity = (route[n] @ queries[n, q]) @ mean / np.linalg.norm(mean)
                scores[n, q, s] = similarity / np.sqrt(len(mean)) + np.log(len(span)) - threshold[n]
    hard = np.zeros_like(scores)
    for k in range(K):
        group = slice(k * G, (k + 1) * G)
        for q in range(Q):
            best = scores[group, q].max(axis=0)
            for s in np.argsort(-best, kind="stable")[:slots]:
                hard[group, q, s] = best[s] > 0
    wish = sigmoid(scores / temperature)
    opened = hard
    if frozen is not None:
        hard, before = frozen
        opened = hard + wish - sigmoid(before / temperature)

    def rows(factors, k, s):
        gates = rank_gates(values, factors.singular[k, s], factors.mean[k, s], ranks[s])
        return (factors.left[k, s] @ (gates[:, None] * factors.right[k, s]))[: len(spans[s])]

    out, log_sum, loss = np.zeros((N, Q, D)), np.zeros((N, Q)), np.zeros_like(scores)
    for k in range(K):
        fine = [(rows(key_factors, k, s), rows(value_factors, k, s)) for s in range(len(spans))]
        for n in range(k * G, (k + 1) * G):
            for q in range(Q):
                query = queries[n, q]
                weights = [np.exp(exact_keys[k, exact] @ query * scale)]
                seen = [exact_values[k, exact]]
                for s, (fine_keys, fine_values) in enumerate(fine):
                    o, size = opened[n, q, s], len(spans[s])
                    weights += [[(1 - o) * size * np.exp(key_factors.mean[k, s] @ query * scale)]]
                    weights += [o * np.exp(fine_keys @ query * scale)]
                    seen += [value_factors.mean[k, s][None], fine_values]
                weights = np.concatenate(weights)
                out[n, q] = weights @ np.concatenate(seen) / weights.sum()
                log_sum[n, q] = np.log(weights.sum())
                mass = np.exp(exact_keys[k] @ query * scale)
                mass = np.array([mass[span].sum() for span in spans]) / mass[~exact].sum()
                order = np.argsort(-mass)
                needed = order[: np.searchsorted(np.cumsum(mass[order]), coverage) + 1]
                for s in range(len(spans)):
                    score = scores[n, q, s]
                    loss[n, q, s] = positive * np.logaddexp(0, -score) if s in needed else np.logaddexp(0, score)
    return out, log_sum, loss.mean(), wish.mean(), (hard, scores)
