"""The parent as a command's argument: a folder, or hf://org/repo[@revision]."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class ParentFolder(click.ParamType):  # type: ignore[type-arg]  # no generic before click 8.2
    """Becomes a folder. A repository's is its sparse mirror: its small files whole, its shards as headers alone."""

    name = "folder|hf://org/repo[@revision]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        if isinstance(value, str) and value.startswith("hf://"):
            from shardmill.pipeline.container.hub import sparse_mirror

            return sparse_mirror(value)
        folder = Path(value)
        if not folder.is_dir():
            self.fail(f"{folder}: is not a folder; give the parent checkpoint's folder", param, ctx)
        return folder
