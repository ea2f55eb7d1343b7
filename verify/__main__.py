"""`python -m shardmill.verify QUESTION DIR`; in a checkout `python -m verify` does the same with nothing installed."""

import gc
import sys
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "src"
if (SOURCES / "shardmill").is_dir():  # a checkout: its own code, whatever else is installed
    sys.path.insert(0, str(SOURCES))

from shardmill.verify.commands.group import verify  # noqa: E402

if __name__ == "__main__":
    gc.set_threshold(1_000_000, 50, 100)  # headers are many small objects without a cycle
    verify(prog_name="python -m verify")
