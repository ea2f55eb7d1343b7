"""What peers do, each a script of its own: `python -c SCRIPT PARENT OUT FACTS JOBS`. FACTS is what our recipe converts.

Each begins with its imports, up to the line `# start`: what stands before it is also timed alone.
"""

LLM_COMPRESSOR = """
import json, sys
from llmcompressor import model_free_ptq
# start
parent, out, ignore = sys.argv[1], sys.argv[2], json.load(open(sys.argv[3]))
model_free_ptq(model_stub=parent, save_directory=out, scheme="FP8_BLOCK", ignore=ignore["ignore"], device="cpu")
"""

_QUANTIZE = """
def quantize(weight, rows, cols):
    R, C = weight.shape
    blocks = weight.float().view(R // rows, rows, C // cols, cols)
    scales = blocks.abs().amax(dim=(1, 3), keepdim=True) / 448.0
    codes = (blocks / torch.where(scales > 0, scales, 1.0)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(R, C), scales.view(R // rows, C // cols).contiguous()

def whole_shard(path):
    tensors = load_file(path)
    for name in [name for name in tensors if name in converted]:
        tensors[name], tensors[name + "_scale_inv"] = quantize(tensors[name], *converted[name])
    save_file(tensors, out / path.name, {"format": "pt"})
"""

TORCH_LOOP = (
    """
import json, sys
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
# start
parent, out, converted = Path(sys.argv[1]), Path(sys.argv[2]), json.load(open(sys.argv[3]))["blocks"]
out.mkdir()
"""
    + _QUANTIZE
    + """
for path in sorted(parent.glob("*.safetensors")):
    whole_shard(path)
"""
)

# The way of ModelOpt's converter for very large checkpoints (`--jobs`): each job has a whole shard in memory.
WHOLE_SHARD = (
    """
import json, sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
# start
parent, out, converted = Path(sys.argv[1]), Path(sys.argv[2]), json.load(open(sys.argv[3]))["blocks"]
jobs = int(sys.argv[4])
out.mkdir()
torch.set_num_threads(1)
"""
    + _QUANTIZE
    + """
with ProcessPoolExecutor(jobs) as pool:
    list(pool.map(whole_shard, sorted(parent.glob("*.safetensors"), key=lambda path: -path.stat().st_size)))
"""
)

# As fast as we could make torch: the parent mapped into memory, buffers used again, a process a core pinned to it,
# what passes through written from the mapping, and what converts taken by rows of blocks.
TORCH_MAPPED = """
import json, os, sys
from multiprocessing import Process, Queue
from pathlib import Path
import torch
# start
parent, out, converted = Path(sys.argv[1]), Path(sys.argv[2]), json.load(open(sys.argv[3]))["blocks"]
jobs, CHUNK = int(sys.argv[4]), 1 << 24
out.mkdir()

def layout(header):
    entries, place = {}, 0
    def add(name, dtype, shape, size):
        nonlocal place
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [place, place + size]}
        place += size
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        if name in converted:
            (R, C), (r, c) = entry["shape"], converted[name]
            add(name, "F8_E4M3", [R, C], R * C)
            add(name + "_scale_inv", "F32", [-(-R // r), -(-C // c)], 4 * -(-R // r) * -(-C // c))
        else:
            add(name, entry["dtype"], entry["shape"], entry["data_offsets"][1] - entry["data_offsets"][0])
    return entries

def convert(source, rows, cols, file, buffers):
    R, C = source.shape
    scales = torch.empty(-(-R // rows), C // cols)
    step = max(1, (1 << 19) // (rows * C)) * rows
    if buffers.get("size", 0) < step * C:
        buffers["size"], buffers["wide"] = step * C, torch.empty(step * C)
        buffers["codes"] = torch.empty(step * C, dtype=torch.float8_e4m3fn)
    for row in range(0, R, step):
        strip = source[row : row + step]
        wide = buffers["wide"][: strip.numel()].view(-1, rows, C // cols, cols)
        wide.copy_(strip.view(wide.shape))
        amax = (strip.view(torch.int16) & 0x7FFF).view(wide.shape).amax(dim=(1, 3)).view(torch.bfloat16).float()
        own = scales[row // rows : row // rows + len(wide)]
        torch.div(amax, 448.0, out=own)
        own[own == 0] = 1.0
        wide.div_(own[:, None, :, None]).clamp_(-448, 448)
        codes = buffers["codes"][: strip.numel()]
        codes.copy_(wide.view(-1))
        file.write(codes.view(torch.uint8).numpy().data)
    file.write(scales.numpy().data)

def shard(path, buffers):
    size = path.stat().st_size
    mapped = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    length = int.from_bytes(bytes(mapped[:8].tolist()), "little")
    header = json.loads(bytes(mapped[8 : 8 + length].numpy()))
    metadata, entries = header.pop("__metadata__", None), layout(header)
    text = json.dumps({**({"__metadata__": metadata} if metadata else {}), **entries}).encode()
    text += b" " * (-len(text) % 8)
    with open(out / path.name, "wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, 8 + len(text) + max(e["data_offsets"][1] for e in entries.values()))
        file.write(len(text).to_bytes(8, "little") + text)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = (8 + length + place for place in entry["data_offsets"])
            if name in converted:  # of whole blocks, as all of the toy parent's are
                convert(mapped[begin:end].view(torch.bfloat16).view(entry["shape"]), *converted[name], file, buffers)
            else:
                for place in range(begin, end, CHUNK):
                    file.write(mapped[place : min(place + CHUNK, end)].numpy().data)

def work(core, todo):
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    buffers = {}
    while (path := todo.get()) is not None:
        shard(path, buffers)

todo = Queue()
paths = sorted(parent.glob("*.safetensors"), key=lambda path: -path.stat().st_size)
for path in [*paths, *[None] * jobs]:
    todo.put(path)
cores = sorted(os.sched_getaffinity(0))
processes = [Process(target=work, args=(cores[place % len(cores)], todo)) for place in range(jobs)]
for process in processes:
    process.start()
for process in processes:
    process.join()
sys.exit(max(abs(process.exitcode) for process in processes))
"""


def imports_of(script: str) -> str:
    """What a script does before its work."""
    return script.partition("# start")[0]
