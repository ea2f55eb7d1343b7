"""The KV latents and the queries of a running model's own attention, kept for the table of KV rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

TOKENS, QUERIES = 512, 32


class Latents:
    """Of each MLA layer the latents of the last long batch, f32 [TOKENS, 512], and queries [QUERIES, heads, 512]."""

    def __init__(self, model: Any) -> None:
        self.latents: dict[str, Any] = {}
        self.queries: dict[str, Any] = {}
        for name, module in model.named_modules():
            impl = getattr(module, "impl", None)
            if hasattr(impl, "forward_mqa"):
                impl.do_kv_cache_update = self._noting(
                    self.latents, name, impl.do_kv_cache_update, slice(TOKENS)
                )
                impl.forward_mqa = self._noting(
                    self.queries, name, impl.forward_mqa, slice(TOKENS - QUERIES, TOKENS)
                )

    def _noting(self, kept: dict[str, Any], name: str, original: Any, part: slice) -> Any:
        def note(first: Any, *rest: Any, **named: Any) -> Any:
            content = first[0] if isinstance(first, tuple) else first
            if content.shape[0] >= TOKENS:  # the last long batch is kept: one request's own
                kept[name] = content[part][..., :512].detach().float().cpu().numpy()
            return original(first, *rest, **named)

        return note

    def save(self, path: Path) -> list[str]:
        """One .npz: `latents/layer` and `queries/layer`, f16; the names kept."""
        kept = {f"latents/{n}": v for n, v in self.latents.items()}
        kept |= {f"queries/{n}": v for n, v in self.queries.items()}
        np.savez_compressed(path, **{name: value.astype(np.float16) for name, value in kept.items()})
        return sorted(kept)
