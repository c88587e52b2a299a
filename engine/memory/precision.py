"""How weights and KV cache are held once they are loaded: bytes by what is stored and what is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.memory.measure import MemoryKind
from engine.memory.shape import ModelShape, WeightGroup
from engine.protocol import EngineConfig

KVFormat = Literal["fp32", "fp16", "bf16", "int8"]
PlainFormat = Literal["fp32", "fp16", "bf16"]

PLAIN_BYTES: dict[PlainFormat, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
_KV_BYTES: dict[KVFormat, int] = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}
# An int8 cache keeps one float32 scale per token and head, for K and for V.
_INT8_SCALE_BYTES = 4

# The native CPU kernels hold matrices in tiles of 8 rows and groups of 32 columns.
_TILE_ROWS = 8
_GROUP = 32
# Bytes of 256 weights there, by what is stored; what is not listed is unpacked to float32.
_NATIVE_BYTES = {
    "Q2_K": 84,
    "Q3_K": 114,
    "IQ4_XS": 138,
    "Q4_0": 144,
    "IQ4_NL": 144,
    "MXFP4": 144,
    "Q4_K": 148,
    "Q4_1": 160,
    "INT4": 160,
    "Q5_0": 176,
    "Q5_K": 180,
    "Q5_1": 192,
    "Q6_K": 210,
    "Q8_0": 272,
    "INT8": 272,
    "F16": 512,
    "BF16": 512,
    "F8": 512,
}
_NATIVEPLAIN_BYTES = 1024
# A scale and a zero point beside the codes of integer weights elsewhere, by bits: in half precision for 4 bits.
_AFFINE_BYTES = {"INT4": 4, "INT8": 8}
# Embedding and head are rounded to 8 bits in groups of this many, whatever the others become.
_TABLE_GROUP = 32
# Stays packed everywhere: of many experts few compute a token.
_MXFP4_GROUP_BYTES = 17


@dataclass(frozen=True)
class Hardware:
    """What holds the model: the kind of memory, and whether native CPU kernels compute there."""

    kind: MemoryKind
    native: bool = False


@dataclass(frozen=True)
class Precision:
    """How a model is held. `native`: matrices in the tiles of the native CPU kernels; `plain` is what is left
    unpacked; `quantize_to` the integers that matrices become while loading. `own_decoder` is false for the model's
    code in transformers, which keeps the embedding plain."""

    plain: PlainFormat
    native: bool
    kv: KVFormat
    quantize_to: Literal["int8", "int4"] | None
    group_size: int
    own_decoder: bool


def precision_of(config: EngineConfig, hardware: Hardware) -> Precision:
    """What the engine makes of a configuration on some hardware. "auto" computes in float32 on a CPU, where halves
    are slow, and in bfloat16 on a GPU; the native CPU kernels keep K and V in float16."""
    plain: PlainFormat = config.dtype if config.dtype != "auto" else "fp32" if hardware.kind == "RAM" else "bf16"
    native = hardware.native and hardware.kind == "RAM" and plain == "fp32"
    own_decoder = config.backend != "transformers"
    kv: KVFormat = config.kv_dtype if config.kv_dtype != "auto" else "fp16" if native and own_decoder else plain
    return Precision(plain, native, kv, config.quantization, config.quantization_group_size, own_decoder)


def weight_bytes(shape: ModelShape, precision: Precision) -> int:
    """Size of a model's weights once they are loaded, without the tables of rotary angles."""
    return sum(_held_bytes(group, precision) for group in shape.weights)


def kv_bytes_per_token(shape: ModelShape, kv_dtype: KVFormat) -> int:
    """K and V of one token over all layers: sum over layers of kv_heads * (key_dim + value_dim) * itemsize.

    Layers with a sliding window keep all tokens like the others: a block holds every layer's K and V.
    """
    per_head = (shape.key_dim + shape.value_dim) * _KV_BYTES[kv_dtype]
    if kv_dtype == "int8":
        per_head += 2 * _INT8_SCALE_BYTES
    return sum(shape.kv_heads) * per_head


def _held_bytes(group: WeightGroup, precision: Precision) -> int:
    stored, group_size = group.stored, group.group_size
    if precision.quantize_to is not None:
        stored, group_size = _rounded(group, precision)
    is_plain = group.role == "small" or (group.role == "embedding" and not precision.own_decoder)
    if not is_plain and precision.native and group.columns % _GROUP == 0 and group_size % _GROUP == 0:
        rows = -(-group.rows // _TILE_ROWS) * _TILE_ROWS
        return rows * group.columns * _NATIVE_BYTES.get(stored, _NATIVEPLAIN_BYTES) // 256
    if not is_plain and stored in _AFFINE_BYTES:
        codes = group.num_weights // (2 if stored == "INT4" else 1)
        groups_in_row = -(-group.columns // (group_size or group.columns))
        return codes + group.rows * groups_in_row * _AFFINE_BYTES[stored]
    if stored == "MXFP4":
        return group.num_weights // _GROUP * _MXFP4_GROUP_BYTES
    return group.num_weights * PLAIN_BYTES[precision.plain]


def _rounded(group: WeightGroup, precision: Precision) -> tuple[str, int]:
    """What a matrix becomes while loading: its kind of codes, and the columns that share a scale (0: a whole row)."""
    if group.role in ("embedding", "head"):
        return "INT8", _TABLE_GROUP
    if precision.quantize_to == "int8" or group.columns % 2:
        return "INT8", 0
    return "INT4", min(precision.group_size, group.columns)
