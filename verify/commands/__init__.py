"""The questions as commands; `verify` is their group."""

from __future__ import annotations

from shardmill.verify.commands.group import verify

__all__ = ["verify"]
