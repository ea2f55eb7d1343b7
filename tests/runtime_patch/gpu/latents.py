"""The KV latents and the queries of a running model's own attention, kept for the table of KV rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

TOKENS, QUERIES = 512, 32


class Latents:
    """Of each MLA layer the latents of the first long batch, f32 [TOKENS, 512], and queries [QUERIES, heads, 512]."""

    def __init__(self, model: Any) -> None:
        self.latents: dict[str, Any] = {}
        self.queries: dict[str, Any] = {}
        for name, module in model.named_modules():
            if name.endswith("kv_a_layernorm"):
                module.register_forward_hook(self._noting(name.removesuffix(".kv_a_layernorm")))
            if hasattr(getattr(module, "impl", None), "forward_mqa"):
                self._wrap(name, module.impl)

    def _noting(self, name: str) -> Any:
        def note(module: Any, inputs: Any, output: Any) -> None:
            if output.shape[0] >= TOKENS and name not in self.latents:
                self.latents[name] = output[:TOKENS].detach().float().cpu().numpy()

        return note

    def _wrap(self, name: str, impl: Any) -> None:
        original = impl.forward_mqa

        def forward_mqa(q: Any, *rest: Any, **named: Any) -> Any:
            content = q[0] if isinstance(q, tuple) else q
            if content.shape[0] >= TOKENS and name not in self.queries:
                kept = content[TOKENS - QUERIES : TOKENS, :, :512]
                self.queries[name] = kept.detach().float().cpu().numpy()
            return original(q, *rest, **named)

        impl.forward_mqa = forward_mqa

    def save(self, path: Path) -> list[str]:
        """One .npz: `latents/layer` and `queries/layer`, f16; the names kept."""
        kept = {f"latents/{n}": v for n, v in self.latents.items()}
        kept |= {f"queries/{n}": v for n, v in self.queries.items()}
        np.savez_compressed(path, **{name: value.astype(np.float16) for name, value in kept.items()})
        return sorted(kept)
