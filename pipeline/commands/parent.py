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
        if not str(value):
            self.fail("is empty; give the parent checkpoint's folder, or hf://org/repo@revision", param, ctx)
        folder = Path(value)
        if not folder.is_dir():
            kind = "is not a folder" if folder.exists() else "does not exist"
            self.fail(f"{value}: {kind}; give the parent checkpoint's folder{_hint(str(value))}", param, ctx)
        return folder

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        """As it is written: a place in capitals would be refused."""
        return "DIR|hf://org/repo[@revision]"


class NamedFolder(click.ParamType):  # type: ignore[type-arg]  # no generic before click 8.2
    """NAME=DIR or NAME=hf://org/repo[@revision] becomes the name and the folder."""

    name = "name=folder"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, Path]:
        if isinstance(value, tuple):
            return value
        name, equals, place = str(value).partition("=")
        if not name or not equals or not place:
            self.fail(f"{value!r} is not of the form NAME=DIR, with the name of a [[source]]", param, ctx)
        return name, ParentFolder().convert(place, param, ctx)

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return "NAME=DIR|NAME=hf://org/repo[@revision]"


def _hint(value: str) -> str:
    """What a place on a network lacks: all other places than folders begin with hf://."""
    if "://" not in value:
        return ""
    small = ", in small letters" if value.lower().startswith("hf://") else ""
    return f", or hf://org/repo@revision{small}"
