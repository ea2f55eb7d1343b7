"""Headless Chromium, asked through its command line alone: the document after loading, and what its console said."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LIGHT, DARK = 1, 0  # of Blink's preferredColorScheme
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)


def chromium(page: Path, *arguments: str, scheme: int = LIGHT) -> tuple[str, str]:
    """(stdout, stderr) of one run that opens `page` and ends."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="chromium-") as profile:
        command = [
            CHROMIUM,
            *_FLAGS,
            f"--user-data-dir={profile}",
            "--window-size=1300,950",
            f"--blink-settings=preferredColorScheme={scheme}",
            *arguments,  # the last of two equal options holds
            page.resolve().as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def console(stderr: str) -> list[str]:
    """What the page's console said."""
    return [line for line in stderr.splitlines() if "CONSOLE" in line]


def probe(page: Path, script: str, folder: Path, width: int = 1200, scheme: int = LIGHT) -> Any:
    """What `script` returns, the body of a function run in a copy of `page`; the console must stay empty.

    It runs in a frame `width` px wide, since a window can't be narrower than 500.
    """
    tell = f"addEventListener('load', () => parent.postMessage((() => {{ {script} }})(), '*'))"
    copy, outer = folder / "copy.html", folder / "outer.html"
    copy.write_text(page.read_text().replace("</body>", f"<script>{tell}</script></body>"))
    outer.write_text(
        f"""<body><iframe src="{copy.name}" width="{width}" height="900" frameborder="0"></iframe>
        <script>onmessage = (told) => {{ document.body.dataset.told = JSON.stringify(told.data); }};</script>"""
    )
    document, errors = chromium(outer, "--dump-dom", "--virtual-time-budget=10000", scheme=scheme)
    assert console(errors) == []
    found = re.search(r'data-told="([^"]*)"', document)
    assert found, "the script did not run"
    return json.loads(html.unescape(found[1]))
