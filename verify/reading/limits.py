"""What the user allows of remote places; apart from the reader of them, which few commands need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Limits:
    """One for the process, set by the commands."""

    seconds: float = 600.0  # of all requests of a place
    private: bool = False  # whether redirects may lead to another host of this network


LIMITS = Limits()
