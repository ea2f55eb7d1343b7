"""More faults of whole checkpoints of every form: what is exchanged, moved, cut, or of another model.

`alone`: integrity, lint or loads must find it. `with parent`: integrity beside the parent, roundtrip or reproduce.
The same questions of the clean checkpoint find nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from shardmill.verify.formats.schemes import Linear, quantized
from shardmill.verify.questions.integrity import integrity
from shardmill.verify.questions.lint import lint
from shardmill.verify.questions.reproduce import reproduce
from shardmill.verify.questions.roundtrip import Limits, roundtrip
from shardmill.verify.reading.checkpoint import open_checkpoint
from shardmill.verify.rules.findings import Report
from tests.verify.form_mutants import FLOATS, FormMutant, _parent, _times, _values, _write, asked
from tests.verify.memory import Memory
from tests.verify.mutants import files_of
from tests.verify.packed_mutants import packed_changes
from tests.verify.zoo import encoders as e
from tests.verify.zoo.model import Blob, Model

HOLE = 4_096
LAYER = "model.layers.1."
Change = Callable[[Model], bool]  # whether it could be made


@dataclass(frozen=True)
class OtherMutant(FormMutant):
    def killed(self) -> bool:
        source = Memory(files_of(self.model))
        if self.how == "alone":
            return integrity(source).exit_code == 1 or lint(source).exit_code == 1
        return any(exit_code == 1 for exit_code in _beside(source, self.moe))


def _beside(source: Memory, moe: bool) -> Iterator[int]:
    floats = Memory(_parent(moe))
    yield integrity(source, floats).exit_code
    yield roundtrip(source, floats, Limits()).exit_code
    yield reproduce(source, floats, blocks=None, seed=1).exit_code


def mutants(words: tuple[str, ...] = ()) -> Iterator[OtherMutant]:
    """Of every form; with the parent where the zoo's floats are its parent, not another's tied or renamed ones."""
    for published in asked(words):
        clean = published.model()
        source = Memory(files_of(clean))
        linears = quantized(open_checkpoint(source, Report("integrity")).tensors)
        foreign = any(_beside(source, published.moe))
        hows = ("alone",) if foreign else ("alone", "with parent")
        for how, operator, change in _changes(linears):
            model = clean.copy()
            if how in hows and change(model):
                yield OtherMutant(published.name, how, operator, "", model, published.moe)


def _changes(linears: dict[str, Linear]) -> Iterator[tuple[str, str, Change]]:
    yield from _of_scales([linear for linear in linears.values() if linear.weight and linear.grid])
    yield from _of_bytes()
    yield from _exchanged()
    yield from packed_changes(linears)
    yield from _of_other_files()


def _of_scales(linears: list[Linear]) -> Iterator[tuple[str, str, Change]]:
    """One weight's scales, or all weights', by a factor, squared, inverted, an exponent off."""
    floats = [
        linear
        for linear in linears
        if linear.kind not in ("nvfp4", "ct-nvfp4", "gptq", "awq", "gpt-oss")
        and "nested_absmax" not in linear.scales
    ]
    grids = [linear.grid.name for linear in floats if linear.grid]
    seconds = [
        linear.scales[leaf].name
        for linear in linears
        for leaf in ("weight_scale_2", "weight_global_scale")
        if leaf in linear.scales
    ]
    for names in (grids, seconds):
        if not names:
            continue
        one = [next((name for name in names if f"{LAYER}mlp" in name and "down" in name), names[0])]
        for word, chosen in (("one weight", one), ("all weights", names)):
            for operator, blob_change in _FAR:
                # absmax is about 0.06: its square in all weights makes a model of weights 17 times smaller, which
                # other models have; nothing but the parent tells it from one, and "with parent" has it.
                if operator == "scales squared" and names[0].endswith("absmax") and len(chosen) > 1:
                    continue
                yield "alone", f"{operator} in {word}", _each(chosen, blob_change)
            for operator, blob_change in _NEAR:
                yield "with parent", f"{operator} in {word}", _each(chosen, blob_change)


def _each(names: list[str], change: Callable[[Blob], None]) -> Change:
    def changed(model: Model) -> bool:
        for name in names:
            change(model[name])
        return True

    return changed


def _squared(blob: Blob) -> None:
    _powered(blob, 2.0)


def _inverted(blob: Blob) -> None:
    _powered(blob, -1.0)


def _powered(blob: Blob, power: float) -> None:
    if blob.dtype in ("F8_E8M0", "U8"):
        exponents = (np.frombuffer(blob.data, "u1").astype(int) - 127) * int(power) + 127
        blob.data = np.clip(exponents, 0, 254).astype("u1").tobytes()
    elif blob.dtype in (*FLOATS, "BF16"):
        with np.errstate(all="ignore"):
            blob.data = e.blob(blob.dtype, _values(blob) ** np.float32(power)).data


_FAR: tuple[tuple[str, Callable[[Blob], None]], ...] = (
    ("scales squared", _squared),
    ("scales inverted", _inverted),
    ("scales times 64", lambda blob: _times(blob, 64.0)),
    ("scales over 64", lambda blob: _times(blob, 1 / 64)),
)
_NEAR: tuple[tuple[str, Callable[[Blob], None]], ...] = (
    ("scales an exponent up", lambda blob: _times(blob, 2.0)),
    ("scales an exponent down", lambda blob: _times(blob, 0.5)),
)


def _of_bytes() -> Iterator[tuple[str, str, Change]]:
    """Holes at odd places, in codes, in scales and in what was kept."""
    for leaf in ("weight", "weight_packed", "qweight"):
        for place in (1_001, 12_001):
            name = f"{LAYER}mlp.down_proj.{leaf}"
            yield "alone", "a hole of 4 KiB in codes", _hole(name, place, HOLE)
            yield (
                "alone",
                "a hole of 4 KiB in an expert",
                _hole(name.replace("mlp.", "mlp.experts.1."), place, HOLE),
            )
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        yield "alone", "a hole of 4 KiB in what is kept", _hole(name, 3_001, HOLE)
    for leaf in ("weight_scale", "weight_scale_inv", "scale", "scales"):
        for half in (0, 1):
            yield "alone", "half of the scales a hole", _half_hole(f"{LAYER}mlp.down_proj.{leaf}", half)


def _hole(name: str, place: int, size: int) -> Change:
    def changed(model: Model) -> bool:
        if name not in model.names or len(model[name].data) < place + size:
            return False
        _write(model[name], place, bytes(size))
        return True

    return changed


def _half_hole(name: str, half: int) -> Change:
    def changed(model: Model) -> bool:
        if name not in model.names or np.prod(model[name].shape) < 2:
            return False
        size = len(model[name].data) // 2
        _write(model[name], half * size, bytes(size))
        return True

    return changed


def _exchanged() -> Iterator[tuple[str, str, Change]]:
    """Tensors that stand in each other's place, and rows and columns of one weight."""
    for operator, a, b in (
        ("two layers exchanged", "model.layers.0.", "model.layers.2."),
        ("two experts exchanged", f"{LAYER}mlp.experts.0.", f"{LAYER}mlp.experts.1."),
        ("k and v exchanged", f"{LAYER}self_attn.k_proj.", f"{LAYER}self_attn.v_proj."),
        ("q and o exchanged", f"{LAYER}self_attn.q_proj.", f"{LAYER}self_attn.o_proj."),
        ("gate and up exchanged", f"{LAYER}mlp.gate_proj.", f"{LAYER}mlp.up_proj."),
        (
            "an expert's gate and up exchanged",
            f"{LAYER}mlp.experts.0.gate_proj.",
            f"{LAYER}mlp.experts.0.up_proj.",
        ),
        ("the norm of another layer", f"{LAYER}input_layernorm.", "model.layers.2.input_layernorm."),
        ("norms of one layer exchanged", f"{LAYER}input_layernorm.", f"{LAYER}post_attention_layernorm."),
        ("head and embedding exchanged", "lm_head.", "model.embed_tokens."),
    ):
        yield "with parent", operator, _swap(a, b)
    for leaf in ("weight", "weight_packed"):
        for name in (f"{LAYER}self_attn.q_proj.{leaf}", f"{LAYER}mlp.experts.1.up_proj.{leaf}"):
            yield "with parent", "two rows exchanged", _rows_exchanged(name)
            yield "with parent", "a column's signs flipped", _column_flipped(name)
            yield "with parent", "a row of zeros", _row_of_zeros(name)
    yield "with parent", "another model's head", _reversed_rows("lm_head.weight")


def _swap(a: str, b: str) -> Change:
    def changed(model: Model) -> bool:
        done = False
        for name in [name for name in model.names if name.startswith(a)]:
            other = b + name.removeprefix(a)
            if other in model.names and model[name].shape == model[other].shape:
                first, second = model[name], model[other]
                done |= first.data != second.data
                first.data, second.data = second.data, first.data
        return done

    return changed


def _matrix(model: Model, name: str) -> np.ndarray | None:  # type: ignore[type-arg]
    if name not in model.names or len(model[name].shape) != 2:
        return None
    return np.frombuffer(model[name].data, "u1").reshape(model[name].shape[0], -1).copy()


def _rows_exchanged(name: str) -> Change:
    def changed(model: Model) -> bool:
        rows = _matrix(model, name)
        if rows is None or rows.shape[1] < 32:
            return False
        rows[[3, 40]] = rows[[40, 3]]
        model[name].data = rows.tobytes()
        return True

    return changed


def _column_flipped(name: str) -> Change:
    def changed(model: Model) -> bool:
        rows = _matrix(model, name)
        if rows is None or rows.shape[1] < 32:  # bitsandbytes stores a column of bytes
            return False
        dtype = model[name].dtype
        if dtype == "I8":
            rows[:, 5] = -rows[:, 5].view("i1").astype("u1")
        elif dtype == "I32":
            rows[:, 5] = (16 - (rows[:, 5] & 0xF)) % 16 | (16 - (rows[:, 5] >> 4)) % 16 << 4
        else:
            width = {"BF16": 2, "F16": 2, "F32": 4}.get(dtype, 1)
            rows[:, 5 * width + width - 1] ^= 0x88 if dtype == "U8" else 0x80
        model[name].data = rows.tobytes()
        return True

    return changed


def _row_of_zeros(name: str) -> Change:
    def changed(model: Model) -> bool:
        rows = _matrix(model, name)
        if rows is None or rows.shape[1] < 32:
            return False
        rows[7] = 0x88 if model[name].dtype == "I32" else 0
        model[name].data = rows.tobytes()
        return True

    return changed


def _reversed_rows(name: str) -> Change:
    def changed(model: Model) -> bool:
        rows = _matrix(model, name)
        if rows is None:
            return False
        model[name].data = rows[::-1].tobytes()
        return True

    return changed


def _of_other_files() -> Iterator[tuple[str, str, Change]]:
    """Config, tokenizer and their like."""
    for operator, key, value in (
        ("rope_theta changed", "rope_theta", 5e5),
        ("eos_token_id changed", "eos_token_id", 7),
        ("norm epsilon changed", "rms_norm_eps", 1e-3),
        ("activation changed", "hidden_act", "gelu"),
        ("heads changed", "num_attention_heads", 8),
    ):
        yield "with parent", operator, _config(key, value)
    for operator, file, data in (
        (
            "another tokenizer",
            "tokenizer.json",
            b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"b": 0}}}',
        ),
        ("another generation_config", "generation_config.json", b'{"eos_token_id": 3}'),
        ("another template", "tokenizer_config.json", b'{"chat_template": "{{ other }}"}'),
    ):
        yield "with parent", operator, _file(file, data)
    for operator, file, data in (
        ("an empty tokenizer", "tokenizer.json", b""),
        (
            "a pointer for a tokenizer",
            "tokenizer.json",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        ),
        (
            "a page for a tokenizer_config",
            "tokenizer_config.json",
            b"<!DOCTYPE html><html><body>404</body></html>",
        ),
        ("half a generation_config", "generation_config.json", b'{"eos_token_id": '),
    ):
        yield "alone", operator, _file(file, data)
    for operator, key, value in (
        ("too few layers in the config", "num_hidden_layers", 2),
        ("too many layers in the config", "num_hidden_layers", 4),
        ("another hidden size", "hidden_size", 96),
        ("another vocabulary", "vocab_size", 300),
    ):
        yield "alone", operator, _config(key, value)
    yield "alone", "hf_quant_config that contradicts", _contradicted
    for name in (f"{LAYER}input_layernorm.weight", f"{LAYER}self_attn.o_proj.weight"):
        yield "alone", "one float of another dtype", _relabelled(name)
    for name in (
        "model.norm.weight",
        "lm_head.weight",
        "model.embed_tokens.weight",
        f"{LAYER}input_layernorm.weight",
    ):
        yield "with parent", "a tensor dropped", _dropped(name)


def _config(key: str, value: object) -> Change:
    def changed(model: Model) -> bool:
        assert model.config is not None
        model.config[key] = value
        return True

    return changed


def _file(name: str, data: bytes) -> Change:
    def changed(model: Model) -> bool:
        model.others[name] = data
        return True

    return changed


def _contradicted(model: Model) -> bool:
    """The legacy file of ModelOpt names another algorithm than config.json."""
    said = (model.config or {}).get("quantization_config")
    if not said or said.get("quant_method") != "modelopt":
        return False
    other = "FP8" if said.get("quant_algo") != "FP8" else "NVFP4"
    model.others["hf_quant_config.json"] = json.dumps({"quantization": {"quant_algo": other}}).encode()
    return True


def _relabelled(name: str) -> Change:
    """The label alone: BF16 bits read as F16 are other numbers."""

    def changed(model: Model) -> bool:
        if name not in model.names or model[name].dtype not in ("BF16", "F16"):
            return False
        model[name].dtype = {"BF16": "F16", "F16": "BF16"}[model[name].dtype]
        return True

    return changed


def _dropped(name: str) -> Change:
    def changed(model: Model) -> bool:
        if name not in model.names:
            return False
        model.drop(name)
        return True

    return changed


def verdicts(stride: int = 1) -> Iterator[tuple[OtherMutant, bool]]:
    for number, mutant in enumerate(mutants()):
        if number % stride == 0:
            yield mutant, mutant.killed()
