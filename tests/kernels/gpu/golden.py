"""Golden digests of a million rows: `python -m tests.kernels.gpu.golden` writes golden.json beside this file.

The rows come from integers (kernels.testing.random_rows), the bytes from the slow reference. A format change must
fail the tests that read the file; write it anew only with a new format.
"""

import hashlib
import json
from pathlib import Path

from shardmill.kernels import kv_row, testing
from shardmill.kernels.formats import bf16_to_f32

FILE = Path(__file__).with_name("golden.json")
TAGS = ("8888-stock", "8888-fine", "8666-fine", "6666-fine", "6666-stock", "6666f-fine")
CHUNK_ROWS = 10_000
CHUNKS = 100


def chunk_bits(chunk: int):
    """The latents of a chunk: bf16 bits u16 [CHUNK_ROWS, 512]."""
    return testing.random_rows(1000 + chunk, CHUNK_ROWS)


def read() -> dict[str, dict[str, str]]:
    """tag -> digest of the first chunk and of all."""
    return json.loads(FILE.read_text())


def whole(chunk_digests: list[str]) -> str:
    """One digest of all chunks' digests, in order."""
    return hashlib.sha256("".join(chunk_digests).encode()).hexdigest()


def main() -> None:
    digests: dict[str, list[str]] = {tag: [] for tag in TAGS}
    for chunk in range(CHUNKS):
        x = bf16_to_f32(chunk_bits(chunk))
        for tag in TAGS:
            rung, policy = tag.split("-")
            digests[tag].append(testing.digest_of_rows(kv_row.encode(rung, x, policy)))
        print(f"{chunk + 1} of {CHUNKS}", flush=True)
    record = {tag: {"first": found[0], "all": whole(found)} for tag, found in digests.items()}
    FILE.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
