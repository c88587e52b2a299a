"""Whether the Triton kernels can run here, and if not, what to do about it."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys

import torch

LEAST_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 and asynchronous copies."""


def is_interpreted() -> bool:
    """Whether Triton was asked to run kernels on the CPU, one program after another: for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def why_no_triton_kernels() -> str | None:
    """Why the Triton kernels cannot run here, and what to do; None when they can."""
    if importlib.util.find_spec("triton") is None:
        if sys.platform != "linux":
            return f"Triton is not made for {sys.platform}"
        return f"Triton is missing; install the version that torch {torch.__version__} was built with"
    if is_interpreted():
        return None
    if not torch.cuda.is_available():
        return "torch sees no NVIDIA GPU"
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}, and they need "
            f"{LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} (RTX 30 series, A100 or later)"
        )
    return None
