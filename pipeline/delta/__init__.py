"""Deltas: what turns one checkpoint into another, written once and applied where the first one is."""
