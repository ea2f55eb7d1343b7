"""`python -m verify QUESTION DIR`: works where pipeline/ is not installed."""

import gc

from verify.commands import verify

if __name__ == "__main__":
    gc.set_threshold(1_000_000, 50, 100)  # headers are many small objects without a cycle
    verify(prog_name="python -m verify")
