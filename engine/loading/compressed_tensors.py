"""Checkpoints of compressed-tensors (llm-compressor): `quant_method: compressed-tensors`.

pack-quantized: weight_packed int32 [out, in * bits / 32], low bits first, holding signed codes plus
2^(bits - 1); weight_scale [out, groups]; weight_zero_point packed along the outputs, int32 [out * bits / 32, groups]
(or int8 [out, groups]); weight_shape int64 [2]; weight_g_idx int32 [in] where activations were ordered.
int-quantized and float-quantized: weight int8 or float8 [out, in] as it is, with the same scales.
https://github.com/vllm-project/compressed-tensors
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.loading.fp8 import FP8_TYPES, block_of, fp8_matrix
from engine.loading.packed import (
    PackedMatrix,
    Parts,
    Settings,
    group_count,
    input_order,
    modules_with,
    reordered,
)
from engine.loading.tensor_files import FLOAT_TYPES, TensorFiles
from engine.quantization.affine import AffineMatrix, unpack_nibbles

_PACKED = "weight_packed"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point")
_OF_CACHE = (".k_scale", ".v_scale", ".q_scale", ".k_zero_point", ".v_zero_point", ".q_zero_point")


def compressed_tensors_matrices(files: TensorFiles, settings: Settings) -> list[PackedMatrix]:
    """Every module with a packed weight, or an integer or 8-bit floating point one with a scale.

    Quantised activations and caches that the checkpoint was made for are not: they cost precision, and only its
    weights take memory. Raises UnsupportedModelError naming a variant that is not read, ModelError for damaged headers.
    """
    for layout in (settings.get("format"), *(group.get("format") for group in _groups(settings))):
        if layout is not None and layout not in _FORMATS:
            raise settings.unsupported(f"compressed-tensors as {layout!r} is not supported")
    sparsity = settings.part("sparsity_config").get("format", default="dense")
    if sparsity != "dense":
        raise settings.unsupported(f"sparse compressed-tensors ({sparsity!r}) are not supported")
    if settings.part("transform_config").get("config_groups"):
        raise settings.unsupported("compressed-tensors with transforms of activations are not supported")
    matrices = [_packed(Parts(files, module), _scheme(settings, module)) for module in modules_with(files, _PACKED)]
    for module in modules_with(files, "weight"):
        kind = files.tensors[f"{module}.weight"].type
        if kind == "I8":
            matrices.append(_integers(Parts(files, module), _scheme(settings, module)))
        elif kind in FP8_TYPES:
            matrices.append(_floats(Parts(files, module), _scheme(settings, module)))
    return matrices


def is_cache_scale(name: str) -> bool:
    """Whether a stored tensor only scales a quantised KV cache."""
    return name.endswith(_OF_CACHE)


def _groups(settings: Settings) -> list[Settings]:
    return [settings.of(group, "config_groups") for group in settings.part("config_groups").values.values()]


def _scheme(settings: Settings, module: str) -> Settings:
    """How the weights of a module are quantised: the group that names it, else the one for its class."""
    of_class = None
    for group in _groups(settings):
        for target in group.names("targets"):
            if target == module or (target.startswith("re:") and settings.matches(target[3:], module)):
                return group.part("weights")
            if of_class is None and (target == "Linear" or (target == "Embedding" and module.endswith("embed_tokens"))):
                of_class = group.part("weights")
    if of_class is None:
        raise settings.error(f"config_groups says nothing of the quantised {module!r}")
    return of_class


def _group_size(scheme: Settings, columns: int, parts: Parts) -> int:
    grouped = scheme.whole_number("group_size", default=-1) > 0
    strategy = scheme.get("strategy", default="group" if grouped else "channel")
    if strategy in ("channel", "tensor"):
        return columns
    if strategy == "group":
        return scheme.group_size(columns, "group_size")
    raise parts.unsupported(f"integer weights quantised by {strategy!r} ({parts.module}) are not supported")


def _packed(parts: Parts, scheme: Settings) -> PackedMatrix:
    bits, kind = scheme.whole_number("num_bits", default=4), scheme.get("type", default="int")
    if bits not in (4, 8) or kind != "int":
        raise parts.unsupported(f"packed weights of {bits} bits ({kind}, {parts.module}) are not supported")
    out, packed_columns = parts.shape(_PACKED, ("I32",))
    if parts.shape("weight_shape", ("I64", "I32"), rank=1) != (2,):
        raise parts.error(f"tensor '{parts.module}.weight_shape' does not hold two numbers")
    rows, columns = parts.read("weight_shape").tolist()
    if rows != out or columns < 1 or group_count(columns * bits, 32) != packed_columns:
        raise parts.error(
            f"tensor '{parts.module}.weight_packed' does not hold {rows} x {columns} codes of {bits} bits"
        )
    if bits == 4 and columns % 2:
        raise parts.unsupported(f"4-bit rows of an odd number of inputs ({parts.module}: {columns}) are not supported")
    group_size = _group_size(scheme, columns, parts)
    scales = _scales(parts, out, columns, group_size)
    zeros = _zeros(parts, out, group_count(columns, group_size), bits)
    ordered = parts.has("weight_g_idx")
    if ordered and parts.shape("weight_g_idx", ("I32", "I64"), rank=1) != (columns,):
        raise parts.error(f"tensor '{parts.module}.weight_g_idx' does not have the {columns} entries of its inputs")
    parts.ignore(*_OF_ACTIVATIONS)

    def affine() -> AffineMatrix:
        codes = parts.read(_PACKED).contiguous().view(torch.uint8)[:, : columns * bits // 8]
        # Where nothing was ordered, the indices are left at -1.
        order = input_order(parts, "weight_g_idx", group_size) if ordered and _is_set(parts) else None
        if order is not None:
            codes = reordered(codes, bits, order)
        return AffineMatrix(codes.contiguous(), scales(), zeros(), bits, group_size, order)

    return parts.matrix((out, columns), f"compressed-tensors {bits} bit", affine=affine)


def _is_set(parts: Parts) -> bool:
    return bool((parts.read("weight_g_idx") >= 0).all())


def _integers(parts: Parts, scheme: Settings) -> PackedMatrix:
    out, columns = parts.shape("weight", ("I8",))
    group_size = _group_size(scheme, columns, parts)
    scales = _scales(parts, out, columns, group_size)
    zeros = _zeros(parts, out, group_count(columns, group_size), 8)
    parts.ignore(*_OF_ACTIVATIONS)

    def affine() -> AffineMatrix:
        codes = parts.read("weight").contiguous().view(torch.uint8) ^ 128
        return AffineMatrix(codes, scales(), zeros(), 8, group_size)

    return parts.matrix((out, columns), "compressed-tensors 8 bit", affine=affine)


def _floats(parts: Parts, scheme: Settings) -> PackedMatrix:
    strategy = scheme.get("strategy", default="tensor")
    if strategy not in ("tensor", "channel", "block"):
        raise parts.unsupported(f"8-bit floating point weights by {strategy!r} ({parts.module}) are not supported")
    parts.ignore(*_OF_ACTIVATIONS, "weight_zero_point")
    block = block_of(scheme, "block_structure") if strategy == "block" else None
    return fp8_matrix(parts, "weight_scale", block)


def _scales(parts: Parts, out: int, columns: int, group_size: int) -> Callable[[], torch.Tensor]:
    groups = group_count(columns, group_size)
    shape = parts.shape("weight_scale", FLOAT_TYPES, rank=None)
    if shape not in ((out, groups), (), (1,), (1, 1)) and not (groups == 1 and shape == (out,)):
        raise parts.error(
            f"tensor '{parts.module}.weight_scale' has shape {list(shape)}, but {[out, columns]} weights in groups "
            f"of {group_size} ask for {[out, groups]}"
        )
    return lambda: _spread(parts.read("weight_scale"), out, groups)


def _zeros(parts: Parts, out: int, groups: int, bits: int) -> Callable[[], torch.Tensor]:
    """Reads zero points in units of unsigned codes: float16 [out, groups]."""
    middle = 1 << (bits - 1)
    if not parts.has("weight_zero_point"):
        return lambda: torch.full((out, groups), float(middle), dtype=torch.float16)
    shape = parts.shape("weight_zero_point", ("I32", "I8", "I64"), rank=None)
    packed = (group_count(out * bits, 32), groups)
    is_packed = parts.stored_type("weight_zero_point") == "I32" and shape == packed
    if not is_packed and shape not in ((out, groups), (out,), (), (1,), (1, 1)):
        raise parts.error(f"tensor '{parts.module}.weight_zero_point' has shape {list(shape)}, not {list(packed)}")

    def read() -> torch.Tensor:
        stored = parts.read("weight_zero_point")
        if not is_packed:
            return _spread((stored.short() + middle).half(), out, groups)
        codes = stored.t().contiguous().view(torch.uint8)
        codes = (unpack_nibbles(codes) if bits == 4 else codes)[:, :out]
        return codes.t().half().contiguous()

    return read


def _spread(values: torch.Tensor, out: int, groups: int) -> torch.Tensor:
    """One value for everything, each row or each group -> [out, groups]."""
    return values.reshape(-1, groups if values.numel() == out * groups else 1).expand(out, groups).contiguous()
