"""`python3 -m tests.kernels.gpu checks|bench [options]`: where no GPU can run them it says why, and succeeds."""

import sys
from importlib import import_module
from importlib.util import find_spec

MODULES = {"checks": "tests.kernels.gpu.gpu_checks", "bench": "tests.kernels.gpu.gpu_bench"}


def obstacle() -> str | None:
    """Why nothing can run here, in words; None where it can."""
    missing = [name for name in ("numpy", "torch", "triton") if find_spec(name) is None]
    if missing:
        return f"{sys.executable} has no {', '.join(missing)}"
    import torch

    return None if torch.cuda.is_available() else "no GPU found"


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in MODULES:
        print(f"usage: python3 -m tests.kernels.gpu {'|'.join(MODULES)}", file=sys.stderr)
        return 2
    why = obstacle()
    if why is not None:
        print(f"skipped: {why}")
        return 0
    code: int = import_module(MODULES[sys.argv[1]]).main(sys.argv[2:])
    return code


if __name__ == "__main__":
    sys.exit(main())
