"""A question that cannot be asked of a checkpoint."""


class UnaskedError(Exception):
    """Nothing is known that would answer the question. The message says what is missing."""
