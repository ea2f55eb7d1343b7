"""Pictures drawn here, so that no collection is needed and every answer is known: colours, counts, short texts."""

from __future__ import annotations

import base64
import struct
import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SIDE = 224
COLOURS = {"red": (200, 30, 30), "green": (30, 150, 40), "blue": (30, 60, 200), "yellow": (230, 200, 20)}
Pixels = NDArray[np.uint8]

# 3 x 5 bitmaps of the digits, a row a number.
DIGITS = {
    "0": (7, 5, 5, 5, 7),
    "1": (2, 6, 2, 2, 7),
    "2": (7, 1, 7, 4, 7),
    "3": (7, 1, 7, 1, 7),
    "4": (5, 5, 7, 1, 1),
    "5": (7, 4, 7, 1, 7),
    "6": (7, 4, 7, 5, 7),
    "7": (7, 1, 2, 2, 2),
    "8": (7, 5, 7, 5, 7),
    "9": (7, 5, 7, 1, 7),
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as a data URL, a question about it, and the word or number that a right answer holds."""

    url: str
    question: str
    answer: str


def draw_pictures(count: int, seed: int) -> list[Picture]:
    """`count` pictures, taking turns between the three kinds; the same seed draws the same bytes."""
    rng = np.random.Generator(np.random.PCG64(seed))
    kinds = (_colour, _count, _number)
    return [kinds[i % 3](rng) for i in range(count)]


def _colour(rng: np.random.Generator) -> Picture:
    name = list(COLOURS)[int(rng.integers(len(COLOURS)))]
    pixels = _canvas()
    pixels[56:168, 56:168] = COLOURS[name]
    return Picture(_url(pixels), "What colour is the square? Answer with one word.", name)


def _count(rng: np.random.Generator) -> Picture:
    number = int(rng.integers(2, 7))
    pixels = _canvas()
    for i in range(number):
        top, left = 20 + 70 * (i // 3), 20 + 70 * (i % 3)
        pixels[top : top + 40, left : left + 40] = COLOURS["blue"]
    return Picture(_url(pixels), "How many squares are there? Answer with a number.", str(number))


def _number(rng: np.random.Generator) -> Picture:
    text = str(int(rng.integers(100, 1000)))
    pixels, dot = _canvas(), 14
    for i, digit in enumerate(text):
        for row, bits in enumerate(DIGITS[digit]):
            for column in range(3):
                if bits >> (2 - column) & 1:
                    top, left = 70 + row * dot, 28 + (i * 4 + column) * dot
                    pixels[top : top + dot, left : left + dot] = 0
    return Picture(_url(pixels), "Which number is written here? Answer with the number alone.", text)


def _canvas() -> Pixels:
    return np.full((SIDE, SIDE, 3), 255, np.uint8)


def _url(pixels: Pixels) -> str:
    return "data:image/png;base64," + base64.b64encode(png(pixels)).decode()


def png(pixels: Pixels) -> bytes:
    """An RGB image u8 [height, width, 3] as PNG."""
    height, width, _ = pixels.shape
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(rows, 9)),
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in (*parts, (b"IEND", b"")))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
