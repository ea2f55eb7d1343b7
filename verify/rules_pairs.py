"""Rules about two things compared, about signatures and about remote places. Rows of verify.rules."""

PAIRS: tuple[tuple[str, str, str, str, str], ...] = ()
