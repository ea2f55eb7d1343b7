"""The errors of the pipeline. Each message is a sentence: which file, which tensor, expected, got, what to do."""

from __future__ import annotations

from collections.abc import Sequence


class ShardmillError(Exception):
    """A file, a folder or an argument is not as it must be. The message is written for the user; exit code 1."""


class RecipeError(ShardmillError):
    """The recipe cannot be used. Holds every problem found in it, so that one reading is enough; exit code 2."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class MissingExtraError(ShardmillError):
    """What was asked for needs a package that is not installed; exit code 2."""


class CheckpointError(ShardmillError):
    """A checkpoint's files contradict each other or the safetensors format."""


class PlanError(ShardmillError):
    """The recipe and the parent do not fit together. Holds every problem found; nothing was written."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class BuildError(ShardmillError):
    """A build stopped before its commit. The earlier checkpoint, where there was one, is untouched."""


class OutputFolderError(BuildError):
    """--out names a folder that is no place for a build: another must be named; exit code 2."""
