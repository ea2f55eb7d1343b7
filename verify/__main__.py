"""`python -m verify QUESTION DIR`: works where pipeline/ is not installed."""

from verify.commands import verify

if __name__ == "__main__":
    verify(prog_name="python -m verify")
