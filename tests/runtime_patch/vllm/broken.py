"""A dozen checkpoints with one fault each, as headers alone: config, index and one file whose data are a hole.

They are cut from the child that our pipeline built: four layers of the text model, the draft as layer 4, two blocks
of the vision tower. A loader needs names, dtypes and shapes to accept or refuse, and those are true.
"""

import json
import re
import struct
from math import prod

LAYERS, DRAFT, BLOCKS = 4, 45, 2
ITEM = {"BF16": 2, "F32": 4, "F8_E4M3": 1, "U8": 1}
TEXT = "model.language_model.layers."


def kept(name):
    """The name in the smaller model, or None where the layer or block is cut."""
    layer = re.match(r"(model\.(?:language_model\.)?layers\.)(\d+)\.(.*)", name)
    if layer:
        number = int(layer[2])
        place = LAYERS if number == DRAFT else number if number < LAYERS else None
        return None if place is None else f"{layer[1]}{place}.{layer[3]}"
    block = re.match(r"model\.visual\.blocks\.(\d+)\.", name)
    return None if block and int(block[1]) >= BLOCKS else name


def read(child):
    """(config, {name: [dtype, shape]}) of the child, cut."""
    tensors = {}
    for path in child.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        header.pop("__metadata__", None)
        tensors |= {kept(n): [m["dtype"], m["shape"]] for n, m in header.items() if kept(n)}
    config = json.loads((child / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] = LAYERS
    for key in ("layer_types", "mlp_layer_types"):
        config["text_config"][key] = config["text_config"][key][:LAYERS]
    config["vision_config"]["depth"] = BLOCKS
    entries = config["quantization_config"]["quantized_layers"]
    config["quantization_config"]["quantized_layers"] = {kept(n): e for n, e in entries.items() if kept(n)}
    return config, tensors


def write(folder, config, tensors):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, offset = {}, 0
    for name, (dtype, shape) in sorted(tensors.items()):
        end = offset + prod(shape) * ITEM[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    index = {
        "metadata": {"total_size": offset},
        "weight_map": dict.fromkeys(sorted(tensors), "model.safetensors"),
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def faults():
    """name -> a function that puts one fault into (manifest entries, tensors)."""
    kda, mla, moe = f"{TEXT}0.self_attn.", f"{TEXT}3.self_attn.", f"{TEXT}3.mlp."

    def rename(old, new):
        return lambda entries, tensors: tensors.update({new: tensors.pop(old)})

    def drop(*names):
        return lambda entries, tensors: [tensors.pop(name) for name in names]

    def bf16(module, listed):
        def change(entries, tensors):
            tensors[f"{module}.weight"][0] = "BF16"
            tensors.pop(f"{module}.weight_scale_inv")
            if not listed:
                entries.pop(module)

        return change

    def reshape(name, shape):
        return lambda entries, tensors: tensors[name].__setitem__(1, shape)

    return {
        "nothing": lambda entries, tensors: None,
        "b_proj kept": bf16(f"{kda}b_proj", listed=False),
        "b_proj kept but listed": bf16(f"{kda}b_proj", listed=True),
        "q_proj unlisted": lambda entries, tensors: entries.pop(f"{kda}q_proj"),
        "kv_a kept": bf16(f"{mla}kv_a_proj_with_mqa", listed=False),
        "up_proj of another algorithm": lambda entries, tensors: entries.update(
            {f"{TEXT}0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}
        ),
        "lm_head scale of another name": rename("lm_head.weight_scale_inv", "lm_head.weight_scale"),
        "down_proj without scale": drop(f"{TEXT}0.mlp.down_proj.weight_scale_inv"),
        "vision proj without scale": drop("model.visual.blocks.0.attn.proj.weight_scale_inv"),
        "vision proj unlisted": lambda entries, tensors: entries.pop("model.visual.blocks.0.attn.proj"),
        "a tensor too many": lambda entries, tensors: tensors.update(
            {f"{moe}router.weight": ["BF16", [4, 256]]}
        ),
        "q_b_proj with 4-D scale": reshape(f"{mla}q_b_proj.weight_scale_inv", [8, 1, 1, 1]),
        "expert without block scales": drop(f"{moe}experts.1.down_proj.weight_scale"),
    }


def make(child, folder):
    """Writes every faulty checkpoint below `folder`; name -> its folder."""
    made = {}
    for number, (name, fault) in enumerate(faults().items()):
        config, tensors = read(child)
        fault(config["quantization_config"]["quantized_layers"], tensors)
        made[name] = folder / str(number)
        write(made[name], config, tensors)
    return made
