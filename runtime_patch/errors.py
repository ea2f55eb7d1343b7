"""Errors of the serving side. Each message is a sentence: what was found, what was expected, what to do."""

from __future__ import annotations


class PatchError(RuntimeError):
    """The plugin will not touch this vLLM, checkpoint or setting: it would serve something other than it says."""


class PresetError(ValueError):
    """A preset file cannot be read, or promises what its own numbers cannot hold."""
