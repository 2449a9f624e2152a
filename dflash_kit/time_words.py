"""Durations in words, as all stages say them."""

RATE_MEMORY_S = 3600.0
"""Over how long bars take the mean of a rate: what they count may take minutes each, and rich forgets after 30 s unless told."""


def duration(seconds: float) -> str:
    """Such as 0.31 s, 45 s, 12 min, 3.4 h."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def time_left(seconds: float) -> str:
    """What stands at the end of a line of progress."""
    return f"about {duration(round(seconds))} left"
