"""How places are divided over layers and heads: the papers' rules, with loops."""

import math

import numpy as np


def tokens(budget, length: int) -> int:
    """A budget in tokens for a prompt of ``length``: an int as it is, a share rounded half up, 1 to ``length``."""
    count = budget if isinstance(budget, int) else max(math.floor(budget * length + 0.5), 1)
    return min(count, length)


def largest_remainder(shares, total: int) -> list[int]:
    """Integers that add up to ``total``: floors, then +1 in order of the largest fractions (ties: lower index)."""
    floors = [math.floor(s) for s in shares]
    order = sorted(range(len(floors)), key=lambda i: (floors[i] - shares[i], i))
    for i in order[: total - sum(floors)]:
        floors[i] += 1
    return floors


def pyramid(budget: int, window: int, layers: int, length: int, beta: int = 20) -> list[int]:
    """PyramidKV (https://arxiv.org/abs/2406.02069) as its authors' code has it; places per layer, window included."""
    b, room = budget - window, length - window
    low = b // beta
    high = 2 * b - low
    if high >= room:
        high = room
        low = 2 * b - high
    step = (high - low) // max(layers - 1, 1)
    return [high - layer * step + window for layer in range(layers)]


def pyramid_exact(budget: int, window: int, layers: int, length: int, beta: int = 20) -> list[int]:
    """``pyramid`` with the sum of an even budget: what whole steps give too much is taken back, last layers first."""
    out, i = pyramid(budget, window, layers, length, beta), layers - 1
    while sum(out) > layers * budget:
        out[i % layers] -= out[i % layers] > window
        i -= 1
    return out


def pyramid_kvpress(budget: float, window: int, layers: int, length: int, beta: int = 20) -> list[int]:
    """PyramidKV as kvpress 0.5.5 has it: the window is inside b, rounding comes last, else every layer gets b."""
    low = budget / beta
    high = 2 * budget - low
    if high > length - window:
        high = length - window
        low = 2 * budget - high
    if not length >= high >= low >= window:
        return [round(budget)] * layers
    return [round(high - layer * (high - low) / (layers - 1)) for layer in range(layers)]


def compresskv(shares, average: int, minimum: int = 32, maximum_factor: int = 3, length: int = 10**9) -> list[int]:
    """CompressKV's layer budgets (https://arxiv.org/abs/2508.02401, Alg. 1, walking as the authors' code does).

    ``shares`` are the layers' normalised errors. Each layer starts from ``minimum``; what is left goes out in
    proportion; what rounding leaves over is walked off one by one, most important layers first. No layer gets more
    than the prompt's ``length``.
    """
    layers = len(shares)
    total, maximum = average * layers, min(maximum_factor * average, length)
    shares = np.asarray(shares, float) / np.sum(shares)
    spare = total - minimum * layers
    out = [min(max(minimum + round(s * spare), minimum), maximum) for s in shares]
    descending = sorted(range(layers), key=lambda i: -shares[i])
    while sum(out) != total:
        add = sum(out) < total
        for i in descending if add else descending[::-1]:
            if add and out[i] < maximum:
                out[i] += 1
            elif not add and out[i] > minimum:
                out[i] -= 1
            if sum(out) == total:
                break
    return out


def adakv(scores: np.ndarray, average: int, uniform: float = 0.2) -> list[int]:
    """Ada-KV (https://arxiv.org/abs/2407.11550): places per head among the prefix scores [K, T'].

    Counts of a common top-K over the layer, mixed with a ``uniform`` share: (1 - a) f_h + floor(a b), made to add up
    by largest remainder.
    """
    heads, total = len(scores), len(scores) * average
    order = sorted(np.ndindex(scores.shape), key=lambda i: (-scores[i], i))[:total]
    found = [sum(h == head for h, _ in order) for head in range(heads)]
    mixed = [(1 - uniform) * f + uniform * average for f in found]
    return largest_remainder(mixed, total)


def capped(shares, total: int, cap: int) -> list[int]:
    """CAKE's repair: proportional places, none above ``cap``, the surplus spread evenly over the others."""
    shares = [float(s) for s in shares]
    while True:
        over = [i for i, s in enumerate(shares) if s > cap]
        if not over:
            return largest_remainder(shares, min(total, cap * len(shares)))
        surplus = sum(shares[i] - cap for i in over)
        free = [i for i, s in enumerate(shares) if s < cap]
        for i in over:
            shares[i] = float(cap)
        for i in free:
            shares[i] += surplus / len(free)
