"""Screenshots of the page of the real layout, to be looked at: two widths, light and dark, and what a printer gets.

python -m tests.verify.report.shots FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from shardmill.verify.report.page import render_page
from tests.verify.report.browser import DARK, LIGHT, chromium
from tests.verify.report.real import real_facts

SIZES = {"desktop": (1200, 5200), "phone": (400, 9800)}
SCHEMES = {"light": LIGHT, "dark": DARK}


def take(folder: Path) -> list[Path]:
    """Writes the page, its screenshots and its print as PDF into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / "report.html"
    page.write_text(render_page(real_facts()))
    taken = []
    for size, (width, height) in SIZES.items():
        for name, scheme in SCHEMES.items():
            shot = folder / f"{size}-{name}.png"
            chromium(page, f"--screenshot={shot}", f"--window-size={width},{height}", scheme=scheme)
            taken.append(shot)
    printed = folder / "print.pdf"
    chromium(page, f"--print-to-pdf={printed}", "--no-pdf-header-footer")
    return [*taken, printed]


if __name__ == "__main__":
    for path in take(Path(sys.argv[1])):
        print(path)
