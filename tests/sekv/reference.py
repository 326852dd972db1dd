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
