"""Where a sample's seed comes from: the system's randomness, so that no forger knows what will be looked at."""

from __future__ import annotations

import secrets

SEED_BITS = 48  # enough that no one tries them all beforehand, short enough to copy


def fresh_seed() -> int:
    return secrets.randbits(SEED_BITS)
