"""A picture of one step, in characters: which stage of which layer ran when."""

from collections.abc import Sequence

from kvec_jax.tiers.recorder import Event

# Device stages run one after the other: each begins when it was dispatched or when the one before has ended.
_DEVICE = ("select", "hit", "miss", "finish")
_ROWS = ("select", "hit", "fetch", "miss", "finish")


def spans(events: Sequence[Event], step: int, layers: Sequence[int]) -> dict[tuple[str, int], list[tuple]]:
    """For each (stage, micro-batch): layer, begin and end in seconds from the first begin on."""
    chosen = [e for e in events if e.step == step and e.layer in layers and e.stage in _ROWS]
    found: dict[tuple[str, int], list[tuple]] = {}
    free = 0.0
    for event in sorted((e for e in chosen if e.stage in _DEVICE), key=lambda e: e.ended):
        began = max(event.dispatched, free)
        free = event.ended
        found.setdefault((event.stage, event.part), []).append((event.layer, began, event.ended))
    for event in chosen:
        if event.stage == "fetch":
            found.setdefault(("fetch", event.part), []).append((event.layer, event.dispatched, event.ended))
    start = min((span[1] for row in found.values() for span in row), default=0.0)
    return {key: [(layer, a - start, b - start) for layer, a, b in row] for key, row in found.items()}


def picture(events: Sequence[Event], step: int, layers: Sequence[int], width: int = 100) -> str:
    """One line per stage and micro-batch; a stage is drawn with the last digit of its layer.

    Example:
        >>> select = Event("select", 1, 0, 0, 0.0, 0.002)
        >>> events = [select, Event("hit", 1, 0, 0, 0.001, 0.004), Event("fetch", 1, 0, 0, 0.002, 0.006)]
        >>> print(picture(events, 1, [0], width=12))
        select |0000        |
        hit    |    0000    |
        fetch  |    00000000|
        0 to 6.0 ms
    """
    found = spans(events, step, layers)
    end = max((span[2] for row in found.values() for span in row), default=1e-9)
    several = len({part for _, part in found}) > 1
    lines = []
    for stage in _ROWS:
        for part in sorted(part for name, part in found if name == stage):
            cells = [" "] * width
            for layer, a, b in found[stage, part]:
                first = min(int(a / end * width), width - 1)
                last = max(min(round(b / end * width), width), first + 1)
                cells[first:last] = str(layer % 10) * (last - first)
            name = f"{stage} {part}" if several else stage
            lines.append(f"{name:<{8 if several else 6}} |{''.join(cells)}|")
    return "\n".join([*lines, f"0 to {end * 1e3:.1f} ms"])
