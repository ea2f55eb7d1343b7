"""The arithmetic that every formula here is written for: round to nearest, and numbers below 2^-126 as they are.

A library that was compiled with -ffast-math may switch a thread to flushing such numbers to zero; then the smallest
weights count as none in a sum of squares, and the smallest products vanish. C's fesetenv puts the default back.
"""

import ctypes

_DEFAULT = ctypes.c_void_p(-1)  # FE_DFL_ENV of glibc and musl
_LIBRARIES = (None, "libm.so.6")


def _setter() -> "ctypes._NamedFuncPointer | None":
    for name in _LIBRARIES:
        try:
            return ctypes.CDLL(name).fesetenv
        except (OSError, AttributeError):
            continue
    return None


_fesetenv = _setter()


def default_arithmetic() -> None:
    """Gives the calling thread IEEE arithmetic with subnormal numbers; nothing where the C library can't."""
    if _fesetenv is not None:
        _fesetenv(_DEFAULT)
