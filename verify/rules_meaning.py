"""Rules about meaning: values of scales, names and groups, loading. Rows of verify.rules."""

E, W, N = "error", "warning", "info"

MEANING = (
    ("SM214", "exclude-pattern", N, "An exclusion pattern that is too costly or malformed to be judged.",
     "Write it as a glob or as a regular expression without nested repeats."),
)  # fmt: skip
