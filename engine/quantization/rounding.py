"""What `quantization` asks for: how each matrix is rounded while it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine.loading.names import EMBEDDING, HEAD
from engine.quantization.affine import AffineMatrix
from engine.quantization.int4 import quantize_int4
from engine.quantization.int8 import quantize_int8

_TABLE_GROUP = 32


@dataclass(frozen=True, slots=True)
class Rounding:
    """int8: a symmetric scale for each row. int4: a scale and a zero point for `group_size` columns of a row.

    Embedding and head are 8 bit in groups of 32 in both: they are read row by row and decide between neighbours,
    and 4 bits would cost there most of what they cost in all. So is a matrix of an odd number of columns.
    """

    method: Literal["int8", "int4"]
    group_size: int

    def __call__(self, name: str, rows: torch.Tensor) -> AffineMatrix:
        """Rounds rows [out, in] of the matrix `name`."""
        if name in (EMBEDDING, HEAD):
            return quantize_int8(rows, _TABLE_GROUP)
        if self.method == "int8" or rows.shape[1] % 2:
            return quantize_int8(rows)
        return quantize_int4(rows, self.group_size)
