"""What all tests share: hypothesis draws the same examples on every run and never judges by time."""

from hypothesis import settings

settings.register_profile("here", deadline=None, derandomize=True)
settings.load_profile("here")
