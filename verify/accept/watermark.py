"""The least free memory of the GPUs while something runs, where nvidia-smi is at hand."""

from __future__ import annotations

import subprocess
import threading


class Watermark:
    """The least free memory of any GPU while a block runs, from nvidia-smi where that is here; None elsewhere."""

    def __init__(self, interval: float = 0.5) -> None:
        self.mib: int | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(interval,), daemon=True)

    def __enter__(self) -> Watermark:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self, interval: float) -> None:
        while not self._stop.is_set():
            free = _free_mib()
            if free is None:
                return
            self.mib = free if self.mib is None else min(self.mib, free)
            self._stop.wait(interval)


def _free_mib() -> int | None:
    words = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout
        return min(int(line) for line in text.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
