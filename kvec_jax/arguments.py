"""Checks of plain numbers that users pass; each raises at the call, with what was expected and what came."""

import numbers


def check_count(name: str, value, low: int) -> None:
    """Raises unless ``value`` is a whole number (not a bool) of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise ValueError(f"{name}: expected an integer, {low} or more, got {value!r}")


def check_kernel(name: str, value) -> None:
    """Raises unless ``value`` is an odd number, from 1 up."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1 or value % 2 == 0:
        raise ValueError(f"{name}: expected an odd number, 1 or more, got {value!r}")


def check_choice(name: str, value, choices: tuple[str, ...]) -> None:
    """Raises unless ``value`` is one of the ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")
