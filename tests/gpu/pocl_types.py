# SPDX-License-Identifier: Apache-2.0
"""float16 and bool for PoCL, whose CPU device lacks ``cl_khr_fp16`` and refuses ``bool*``.

Half values become structures of the same bits that can be loaded, stored and converted, and
nothing else: kernels that accumulate in float32 run unchanged, and arithmetic in half precision
is an error of the OpenCL compiler rather than a wrong number.
"""

from __future__ import annotations

import re

_SCALAR = """
typedef struct { ushort bits; } stored_half;
float __attribute__((overloadable)) convert_float(stored_half h) {
  return vload_half(0, (const __private half*)&h.bits);
}
stored_half __attribute__((overloadable)) convert_half(float x) {
  stored_half h;
  vstore_half_rte(x, 0, (__private half*)&h.bits);
  return h;
}
"""
_VECTOR = """
typedef struct { ushort@ bits; } stored_half@;
float@ __attribute__((overloadable)) convert_float@(stored_half@ h) {
  return vload_half@(0, (const __private half*)&h.bits);
}
stored_half@ __attribute__((overloadable)) convert_half@(float@ x) {
  stored_half@ h;
  vstore_half@_rte(x, 0, (__private half*)&h.bits);
  return h;
}
"""
_ACCESS = """
stored_half@ __attribute__((overloadable)) vload@(size_t i, const $ stored_half* p) {
  stored_half@ h = {vload@(i, (const $ ushort*)p)};
  return h;
}
void __attribute__((overloadable)) vstore@(stored_half@ h, size_t i, $ stored_half* p) {
  vstore@(h.bits, i, ($ ushort*)p);
}
"""
_LANES = ("2", "4", "8", "16")
_SPACES = ("__global", "__local", "__private")


def _prelude() -> str:
    parts = [_SCALAR]
    for lanes in _LANES:
        parts.append(_VECTOR.replace("@", lanes))
        parts += [_ACCESS.replace("@", lanes).replace("$", space) for space in _SPACES]
    return "".join(parts)


def without_half_and_bool(source: str) -> str:
    """Rewrite TVM's OpenCL text so that it needs neither ``cl_khr_fp16`` nor ``bool*``.

    Parameters
    ----------
    source : str
        One kernel with its declarations, as TVM's OpenCL code generator writes it.

    Returns
    -------
    source : str
        The text for PoCL; unchanged where it has neither type.
    """
    source = re.sub(r"\b(__global|__local) bool\b", r"\1 uchar", source)
    if not re.search(r"\bhalf\d*\b", source):
        return source
    source = re.sub(r"#ifdef cl_khr_fp16.*?#endif\n", "", source, flags=re.DOTALL)
    # A constant is written as a cast, which a structure cannot take.
    source = re.sub(r"\(half\)(-?[\d.e+-]+f)", r"convert_half(\1)", source)
    return _prelude() + re.sub(r"\bhalf(\d*)\b", r"stored_half\1", source)
