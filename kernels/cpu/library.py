"""The native library behind its C interface (src/kvasir_cpu.h), through ctypes.

The library is optional: a machine without a compiler at install time lacks it, and
`load()` says so. Everything that mirrors the header stands in this file.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from ctypes import POINTER, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

ABI_VERSION = 6
GROUP = 32
TILE = 8
PANEL = 4


class WeightFormat(enum.IntEnum):
    """By the names that files give their tensor types."""

    F32 = 0
    F16 = 1
    BF16 = 2
    Q4_0 = 3
    Q4_1 = 4
    Q5_0 = 5
    Q5_1 = 6
    Q8_0 = 7
    Q2_K = 8
    Q3_K = 9
    Q4_K = 10
    Q5_K = 11
    Q6_K = 12
    IQ4_NL = 13
    IQ4_XS = 14
    MXFP4 = 15


class OpKind(enum.IntEnum):
    EMBED = 0
    NORM = 1
    QUANTIZE = 2
    MATMUL = 3
    ROPE_KV = 4
    ATTENTION = 5
    SELECT = 6
    ROUTE = 7
    GATHER = 8
    EXPERT_MATMUL = 9
    COMBINE = 10


class ActivationKind(enum.IntEnum):
    F32 = 0
    INT8 = 1
    INT16 = 2
    BYTE_PAIR = 3


class Epilogue(enum.IntEnum):
    STORE = 0
    ADD = 1
    SWIGLU = 2
    GEGLU = 3
    CLAMPED_SWIGLU = 4


class CacheKind(enum.IntEnum):
    F32 = 0
    F16 = 1
    INT8 = 2


class Weight(ctypes.Structure):
    _fields_ = [("format", c_int32), ("rows", c_int32), ("columns", c_int32), ("reserved", c_int32), ("data", c_void_p)]


class Rows(ctypes.Structure):
    _fields_ = [("rows", c_void_p), ("num_rows", c_int64)]


class Packing(ctypes.Structure):
    _fields_ = [
        ("format", c_int32),
        ("columns", c_int32),
        ("parts", POINTER(Rows)),
        ("num_parts", c_int64),
        ("packed", c_void_p),
    ]


class ActivationBuffer(ctypes.Structure):
    _fields_ = [
        ("kind", c_int32),
        ("columns", c_int32),
        ("values", c_void_p),
        ("scales", c_void_p),
        ("scaled_sums", c_void_p),
    ]


class AttentionSpec(ctypes.Structure):
    _fields_ = [
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("rotary_dim", c_int32),
        ("block_size", c_int32),
        ("cache_kind", c_int32),
        ("window", c_int32),
        ("rope_by_row", c_int32),
        ("full_width_norm", c_int32),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("norm_eps", c_float),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("sinks", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
    ]


class Routing(ctypes.Structure):
    _fields_ = [
        ("num_experts", c_int32),
        ("num_chosen", c_int32),
        ("normalize", c_int32),
        ("reserved", c_int32),
        ("first_share", c_void_p),
        ("shares", c_void_p),
        ("places", c_void_p),
        ("weights", c_void_p),
    ]


class Op(ctypes.Structure):
    _fields_ = [
        ("kind", c_int32),
        ("epilogue", c_int32),
        ("columns", c_int32),
        ("on_selected", c_int32),
        ("factor", c_float),
        ("soft_cap", c_float),
        ("output_stride", c_int32),
        ("input", c_void_p),
        ("output", c_void_p),
        ("norm", c_void_p),
        ("bias", c_void_p),
        ("weight", POINTER(Weight)),
        ("activation", POINTER(ActivationBuffer)),
        ("attention", POINTER(AttentionSpec)),
        ("routing", POINTER(Routing)),
    ]


class Batch(ctypes.Structure):
    _fields_ = [
        ("num_rows", c_int32),
        ("num_sequences", c_int32),
        ("num_selected", c_int32),
        ("max_blocks", c_int32),
        ("input_ids", c_void_p),
        ("positions", c_void_p),
        ("slot_mapping", c_void_p),
        ("cu_seqlens_q", c_void_p),
        ("seq_lens", c_void_p),
        ("block_tables", c_void_p),
        ("selected", c_void_p),
    ]


class Adjustment(ctypes.Structure):
    _fields_ = [
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("num_cells", c_int64),
        ("cell_rows", c_void_p),
        ("cell_ids", c_void_p),
        ("cell_values", c_void_p),
        ("repetition", c_void_p),
        ("presence", c_void_p),
        ("frequency", c_void_p),
        ("slots", c_void_p),
        ("num_slots", c_int32),
        ("num_deltas", c_int32),
        ("sequence", c_void_p),
        ("output", c_void_p),
        ("delta_ids", c_void_p),
        ("delta_sequence", c_void_p),
        ("delta_output", c_void_p),
    ]


class Sampling(ctypes.Structure):
    _fields_ = [
        ("num_rows", c_int32),
        ("vocab_size", c_int32),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("temperature", c_void_p),
        ("min_p", c_void_p),
        ("top_k", c_void_p),
        ("top_p", c_void_p),
        ("temperature_last", c_void_p),
        ("uniforms", c_void_p),
        ("probs", c_void_p),
        ("probs_stride", c_int64),
        ("draft_ids", c_void_p),
        ("draft_probs", c_void_p),
        ("draft_probs_stride", c_int64),
        ("accept_uniforms", c_void_p),
        ("accepted", c_void_p),
        ("token_ids", c_void_p),
        ("healthy", c_void_p),
    ]


_SIGNATURES = {
    "kv_abi_version": (c_int32, []),
    "kv_instruction_set": (c_char_p, []),
    "kv_instruction_sets": (c_char_p, []),
    "kv_use_instruction_set": (c_int32, [c_char_p]),
    "kv_set_num_threads": (c_int32, [c_int32]),
    "kv_packed_bytes": (c_int64, [c_int32, c_int64, c_int32]),
    "kv_pack": (c_int32, [POINTER(Packing), c_int32]),
    "kv_dequantize": (c_int32, [POINTER(Weight), c_int32, c_int32, c_void_p]),
    "kv_check": (c_int32, [POINTER(Op), c_int32]),
    "kv_run": (None, [POINTER(Op), c_int32, POINTER(Batch)]),
    "kv_matmul": (c_int32, [POINTER(Weight), c_int32, c_void_p, c_int32, c_void_p, c_void_p]),
    "kv_run_profiled": (None, [POINTER(Op), c_int32, POINTER(Batch), c_void_p]),
    "kv_adjust_logits": (c_int32, [POINTER(Adjustment)]),
    "kv_sample": (c_int32, [POINTER(Sampling)]),
    "kv_run_steps": (
        c_int32,
        [POINTER(Op), c_int32, POINTER(Batch), POINTER(Sampling), c_int32, c_int32, c_void_p],
    ),
}


class NativeLibraryError(RuntimeError):
    """The native library is missing, of another version, or refused a request."""


def library_path() -> Path | None:
    """The library that the package build made, or None."""
    folder = Path(__file__).parent
    found = sorted(path for path in folder.glob("_native*") if path.suffix in (".so", ".pyd", ".dll", ".dylib"))
    return found[0] if found else None


@functools.cache
def load() -> ctypes.CDLL:
    """Loads the library once. Raises `NativeLibraryError` saying what is missing and what to do."""
    path = library_path()
    if path is None:
        raise NativeLibraryError(
            "the native CPU kernels were not built (no C++ compiler when Kvasir was installed); "
            "install one (Debian: g++) and run `pip install -e .` again"
        )
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise NativeLibraryError(f"the native CPU kernels in {path} cannot be loaded: {error}") from error
    if library.kv_abi_version() != ABI_VERSION:
        raise NativeLibraryError(
            f"the native CPU kernels in {path} have interface version {library.kv_abi_version()}, "
            f"this Kvasir needs {ABI_VERSION}; run `pip install -e .` again"
        )
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


def instruction_sets() -> list[str]:
    """The instruction sets that both the build and this processor have, best first."""
    return load().kv_instruction_sets().decode().split()


def instruction_set() -> str:
    """The instruction set in use."""
    return load().kv_instruction_set().decode()


def use_instruction_set(name: str) -> None:
    """Raises `NativeLibraryError` if this build or this processor lacks it."""
    if load().kv_use_instruction_set(name.encode()) != 0:
        raise NativeLibraryError(f"no {name} kernels here; there are: {', '.join(instruction_sets())}")


_num_threads = 1


def set_num_threads(num_threads: int) -> int:
    """Sizes the library's own thread pool, the calling thread included; returns the size in use."""
    global _num_threads
    _num_threads = load().kv_set_num_threads(num_threads)
    return _num_threads


def num_threads() -> int:
    """The size of the library's own thread pool, the calling thread included."""
    return _num_threads
