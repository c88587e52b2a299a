"""The Triton kernels under the names of `kernels.ops`; what has no kernel of its own is torch's or the reference's."""

from __future__ import annotations

from torch.nn.functional import linear as linear

from kernels.reference import dequantize as dequantize
from kernels.reference import quantized_linear as quantized_linear
from kernels.triton.attention import paged_attention as paged_attention
from kernels.triton.norm import clamped_swiglu as clamped_swiglu
from kernels.triton.norm import gelu_tanh_and_mul as gelu_tanh_and_mul
from kernels.triton.norm import rms_norm as rms_norm
from kernels.triton.norm import silu_and_mul as silu_and_mul
from kernels.triton.rope import rope_and_write_kv as rope_and_write_kv
from kernels.triton.sampling import adjust_logits as adjust_logits
from kernels.triton.sampling import sample as sample
from kernels.triton.sampling import verify_drafts as verify_drafts
