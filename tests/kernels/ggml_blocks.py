"""Makes blocks of GGUF's formats: random ones, and plain roundings where `gguf` cannot pack a format itself."""

from __future__ import annotations

import gguf
import numpy as np

from kernels.ggml import FORMATS

# Where a block's half-precision scales and minima lie.
_HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
_IQ4_VALUES = np.array(gguf.quants.IQ4_NL.kvalues, dtype=np.float32)


def random_blocks(tensor_type: str, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """uint8 [rows, row_bytes] whose codes are any bytes, and whose numbers are of about unit size."""
    rng = np.random.default_rng(seed)
    if tensor_type in ("F32", "F16", "BF16"):
        return quantize(rng.standard_normal((rows, columns)).astype(np.float32), tensor_type)
    block = FORMATS[tensor_type]
    count = columns // block.block_elements
    data = rng.integers(0, 256, (rows, count, block.block_bytes), dtype=np.uint8)
    largest = 2.0 ** np.ceil(np.log2(np.abs(dequantize(_with_scales(data, tensor_type, 1.0), tensor_type)).max()))
    data = _with_scales(data, tensor_type, 4 * rng.standard_normal((rows, count)) / largest)
    return data.reshape(rows, -1)


def _with_scales(data: np.ndarray, tensor_type: str, scales: np.ndarray | float) -> np.ndarray:
    data, rows, count = data.copy(), *data.shape[:2]
    for offset in _HALVES.get(tensor_type, ()):
        halves = np.broadcast_to(np.asarray(scales, dtype="<f2"), (rows, count)).copy()
        data[:, :, offset : offset + 2] = halves.view(np.uint8).reshape(rows, count, 2)
    if tensor_type == "MXFP4":
        data[:, :, 0] = data[:, :, 0] % 8 + 120
    return data


def dequantize(packed: np.ndarray, tensor_type: str) -> np.ndarray:
    """What `gguf` says the rows stand for: float32 [rows, columns]."""
    values = gguf.quants.dequantize(packed.reshape(packed.shape[0], -1), gguf.GGMLQuantizationType[tensor_type])
    return np.ascontiguousarray(values).reshape(packed.shape[0], -1)


def quantize(values: np.ndarray, tensor_type: str) -> np.ndarray:
    """float32 [..., columns] rounded to a format: uint8 [..., row_bytes]."""
    rows = values.reshape(-1, values.shape[-1])
    if tensor_type in _PACKERS:
        blocks = rows.reshape(-1, FORMATS[tensor_type].block_elements)
        packed = np.concatenate(_PACKERS[tensor_type](blocks), axis=1)
    else:
        packed = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[tensor_type]).view(np.uint8)
    return np.ascontiguousarray(packed).reshape(*values.shape[:-1], -1)


def _half(values: np.ndarray) -> np.ndarray:
    return values.astype("<f2").reshape(-1, 1).view(np.uint8)


def _divided(values: np.ndarray, by: np.ndarray) -> np.ndarray:
    return np.divide(values, by, out=np.zeros_like(values), where=by != 0)


def _planes(codes: np.ndarray, bits: int, width: int) -> np.ndarray:
    """The inverse of `kernels.ggml._planes`: codes that lie `width` apart share a byte."""
    grouped = codes.astype(np.uint8).reshape(codes.shape[0], -1, 8 // bits, width)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    return np.bitwise_or.reduce((grouped & ((1 << bits) - 1)) << shifts, axis=2).reshape(codes.shape[0], -1)


def _affine_codes(
    blocks: np.ndarray, group: int, largest: int, most: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Halves d and dmin, whole scales and minima up to `most`, codes up to `largest`, of groups of columns."""
    groups = blocks.reshape(blocks.shape[0], -1, group)
    minimum = np.minimum(groups.min(2), 0)
    scale = (groups.max(2) - minimum) / largest
    d, dmin = scale.max(1, keepdims=True) / most, -minimum.min(1, keepdims=True) / most
    scales, minima = np.round(_divided(scale, d + 0 * scale)), np.round(_divided(-minimum, dmin + 0 * minimum))
    d, dmin = (values.astype(np.float16).astype(np.float32) for values in (d, dmin))
    codes = np.round(_divided(groups + (dmin * minima)[..., None], (d * scales)[..., None] + 0 * groups))
    codes = codes.clip(0, largest).astype(np.uint8).reshape(blocks.shape)
    return _half(d), _half(dmin), scales.astype(np.uint8), minima.astype(np.uint8), codes


def _signed_codes(blocks: np.ndarray, group: int, largest: int, most: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Half d, whole scales up to `most`, quotients up to about `largest` (not yet rounded), all of one sign."""
    groups = blocks.reshape(blocks.shape[0], -1, group)
    scale = np.abs(groups).max(2) / largest
    d = scale.max(1, keepdims=True) / most
    scales = np.round(_divided(scale, d + 0 * scale))
    d = d.astype(np.float16).astype(np.float32)
    quotients = _divided(groups, (d * scales)[..., None] + 0 * groups).reshape(blocks.shape)
    return _half(d), scales.astype(np.int8), quotients


def _six_bit_pairs(scales: np.ndarray, minima: np.ndarray) -> np.ndarray:
    low = [scales[:, :4] | scales[:, 4:] >> 4 << 6, minima[:, :4] | minima[:, 4:] >> 4 << 6]
    return np.concatenate([*low, scales[:, 4:] & 15 | minima[:, 4:] << 4], axis=1)


def _nearest_iq4(quotients: np.ndarray) -> np.ndarray:
    return np.abs(quotients[..., None] - _IQ4_VALUES).argmin(-1).astype(np.uint8)


def _q2_k(blocks: np.ndarray) -> list[np.ndarray]:
    d, dmin, scales, minima, codes = _affine_codes(blocks, 16, 3, 15)
    return [scales | minima << 4, _planes(codes, 2, 32), d, dmin]


def _q3_k(blocks: np.ndarray) -> list[np.ndarray]:
    d, scales, quotients = _signed_codes(blocks, 16, 4, 31)
    codes = (np.round(quotients).clip(-4, 3) + 4).astype(np.uint8)
    biased = (scales + 32).astype(np.uint8)
    packed_scales = [_planes(biased & 15, 4, 8), _planes(biased >> 4, 2, 4)]
    return [_planes(codes >> 2, 1, 32), _planes(codes & 3, 2, 32), *packed_scales, d]


def _q4_k(blocks: np.ndarray) -> list[np.ndarray]:
    d, dmin, scales, minima, codes = _affine_codes(blocks, 32, 15, 63)
    return [d, dmin, _six_bit_pairs(scales, minima), _planes(codes, 4, 32)]


def _q5_k(blocks: np.ndarray) -> list[np.ndarray]:
    d, dmin, scales, minima, codes = _affine_codes(blocks, 32, 31, 63)
    return [d, dmin, _six_bit_pairs(scales, minima), _planes(codes >> 4, 1, 32), _planes(codes & 15, 4, 32)]


def _q6_k(blocks: np.ndarray) -> list[np.ndarray]:
    d, scales, quotients = _signed_codes(blocks, 16, 31, 127)
    codes = (np.round(quotients).clip(-32, 31) + 32).astype(np.uint8)
    return [_planes(codes & 15, 4, 64), _planes(codes >> 4, 2, 32), scales.view(np.uint8), d]


def _iq4_nl(blocks: np.ndarray) -> list[np.ndarray]:
    d, _, quotients = _signed_codes(blocks, 32, 113, 1)
    return [d, _planes(_nearest_iq4(quotients), 4, 16)]


def _iq4_xs(blocks: np.ndarray) -> list[np.ndarray]:
    d, scales, quotients = _signed_codes(blocks, 32, 113, 31)
    biased = (scales + 32).astype(np.uint8)
    return [d, _planes(biased >> 4, 2, 1), _planes(biased & 15, 4, 1), _planes(_nearest_iq4(quotients), 4, 16)]


_PACKERS = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
