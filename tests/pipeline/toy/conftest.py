"""The tiny toy parent, made once for all tests here, and its tensors as arrays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from shardmill.pipeline.container.header import read_header
from shardmill.pipeline.toy.sizes import SIZES
from shardmill.pipeline.toy.write import toy_headers, write_parent
from shardmill.pipeline.types import DTYPE_BITS

ARRAY_DTYPES = {"BF16": np.uint16, "F32": np.float32, "U8": np.uint8, "F8_E4M3": np.uint8}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_parent(folder, SIZES["tiny"], toy_headers(SIZES["tiny"]), lambda count: None)
    return folder


@pytest.fixture(scope="session")
def tensor(tiny: Path) -> Callable[[str], np.ndarray]:
    """name -> its array; BF16 as bits."""
    headers = [read_header(path, path.name) for path in sorted(tiny.glob("*.safetensors"))]
    places = {ref.name: (header, ref) for header in headers for ref in header.tensors}

    def read(name: str) -> np.ndarray:
        header, ref = places[name]
        dtype = np.dtype(ARRAY_DTYPES[ref.dtype])
        assert dtype.itemsize * 8 == DTYPE_BITS[ref.dtype]
        count = ref.bytes // dtype.itemsize
        return np.fromfile(tiny / ref.shard, dtype, count, offset=header.data_begin + ref.begin).reshape(
            ref.shape
        )

    return read
