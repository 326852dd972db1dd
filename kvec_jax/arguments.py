"""Checks of plain numbers that users pass; each raises at the call, with what was expected and what came."""

import math
import numbers


def check_count(name: str, value, low: int) -> None:
    """Raises unless ``value`` is a whole number (not a bool) of at least ``low``."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise ValueError(f"{name}: expected an integer, {low} or more, got {value!r}")


def check_kernel(name: str, value) -> None:
    """Raises unless ``value`` is an odd number, from 1 up."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1 or value % 2 == 0:
        raise ValueError(f"{name}: expected an odd number, 1 or more, got {value!r}")


def check_number(name: str, value, low: float = -math.inf, *, above: bool = False) -> None:
    """Raises unless ``value`` is a finite real number (not a bool) of at least ``low``, or ``above`` it."""
    fits = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    if not fits or value < low or (above and value == low):
        bound = "a number" if low == -math.inf else f"a number above {low:g}" if above else f"a number, {low:g} or more"
        raise ValueError(f"{name}: expected {bound}, got {value!r}")


def check_share(name: str, value) -> None:
    """Raises unless ``value`` is a number from 0 to 1."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 <= value <= 1:
        raise ValueError(f"{name}: expected a share in [0, 1], got {value!r}")


def check_flag(name: str, value) -> None:
    """Raises unless ``value`` is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {value!r}")


def check_choice(name: str, value, choices: tuple[str, ...]) -> None:
    """Raises unless ``value`` is one of the ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}: expected {' or '.join(map(repr, choices))}, got {value!r}")
