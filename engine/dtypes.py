"""The types that numbers are computed and KV is held in, by the names people choose them with."""

from __future__ import annotations

import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
KV_DTYPES = DTYPES | {"int8": torch.int8}
_NAMES = {dtype: name for name, dtype in KV_DTYPES.items()}


def dtype_name(dtype: torch.dtype) -> str:
    return _NAMES[dtype]
