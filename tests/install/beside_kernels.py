"""Installs the wheel beside Hugging Face's `kernels` and `transformers`, in both orders, and imports all of them.

    python -m tests.install.beside_kernels WHEEL FOLDER  # makes two venvs in FOLDER; needs a package index

Both packages once owned the name `kernels` at top level, and whichever came last broke the other.
"""

import subprocess
import sys
from pathlib import Path

OTHERS = ("kernels", "transformers")
IMPORTS = (
    "import transformers.models.llama, shardmill.kernels.formats, shardmill.verify, shardmill.pipeline.run.build; "
    "from kernels import get_kernel; import kernels; "
    "assert 'shardmill' not in (kernels.__file__ or ''), kernels.__file__; print('imports: fine')"
)


def pip(python: Path, *words: str) -> None:
    subprocess.run([str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", *words], check=True)


def tried(folder: Path, wheel: str, ours_last: bool) -> None:
    """One order: install, import everything, uninstall ours, import theirs."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    python = (folder / "bin" / "python").absolute()
    for packages in [OTHERS, (wheel,)] if ours_last else [(wheel,), OTHERS]:
        pip(python, "install", *packages)
    subprocess.run(
        [str(python), "-c", IMPORTS], check=True, cwd=folder
    )  # the checkout has a folder `kernels`
    pip(python, "uninstall", "--yes", "shardmill")
    subprocess.run(
        [str(python), "-c", "import transformers.models.llama, kernels; kernels.get_kernel"],
        check=True,
        cwd=folder,
    )


def main(wheel: str, folder: Path) -> None:
    for ours_last in (True, False):
        tried(folder / ("ours-last" if ours_last else "ours-first"), wheel, ours_last)
        print(f"ours {'last' if ours_last else 'first'}: kernels, transformers and shardmill import")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
