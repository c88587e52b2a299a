"""The operations a decoder is made of, each sent to the fastest backend at hand.

`KVASIR_KERNELS=reference|cpu|triton` forces one; a forced backend that cannot run is an error.
The choice is made at the first operation and then kept.

The cpu backend runs whole decoder steps (kernels.cpu.program), since between single operations
a CPU loses more time than in them, and it samples; what else is asked of it one by one is computed
by the reference.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch

from kernels import reference, reference_sampling
from kernels.cpu import library as cpu_library
from kernels.cpu import sampling as cpu_sampling
from kernels.ggml import FORMATS
from kernels.gpu import is_usable as gpu_is_usable
from kernels.gpu import why_no_triton_kernels as why_no_triton_kernels
from kernels.kv import KVLayer
from kernels.metadata import AttentionMetadata
from kernels.sampling import SamplingBatch

BACKEND_VARIABLE = "KVASIR_KERNELS"
BACKENDS = ("reference", "cpu", "triton")
QUANTIZED_FORMATS = tuple(FORMATS)

_device_type: str | None = None


class KernelBackendError(RuntimeError):
    """A kernel backend was asked for by name and cannot run here."""


@functools.cache
def why_no_cpu_kernels() -> str | None:
    """Why the native CPU kernels cannot run here, and what to do; None when they can."""
    try:
        cpu_library.load()
    except cpu_library.NativeLibraryError as error:
        return str(error)
    return None


def available_backends() -> tuple[str, ...]:
    """Names of the backends that can run here."""
    reasons = {"cpu": why_no_cpu_kernels(), "triton": why_no_triton_kernels()}
    return ("reference", *(name for name, reason in reasons.items() if reason is None))


def kernel_backend() -> str:
    """Name of the backend in use: "reference", "cpu" or "triton".

    Raises KernelBackendError when `KVASIR_KERNELS` names an unknown or unavailable one.
    """
    forced = os.environ.get(BACKEND_VARIABLE, "").strip()
    available = available_backends()
    if not forced:
        best = "triton" if gpu_is_usable() and _device_type != "cpu" else "cpu"
        return best if best in available else "reference"
    if forced not in BACKENDS:
        raise KernelBackendError(f"{BACKEND_VARIABLE}={forced!r} is unknown; choose one of {', '.join(BACKENDS)}")
    if forced not in available:
        reason = why_no_cpu_kernels() if forced == "cpu" else why_no_triton_kernels()
        raise KernelBackendError(
            f"{BACKEND_VARIABLE}={forced} asks for kernels that cannot run: {reason}. "
            f"Unset it or choose one of {', '.join(available)}."
        )
    return forced


def compute_on(device_type: str) -> bool:
    """From now on chooses for tensors on "cpu" or "cuda"; before that, for a GPU where there is one.

    Returns whether another backend is in use now. One process computes on one kind of device at a time.
    """
    global _device_type
    before, _device_type = kernel_backend(), device_type
    _backend.cache_clear()
    _host_sampling.cache_clear()
    return kernel_backend() != before


def is_forced() -> bool:
    """Whether the environment names a backend."""
    return bool(os.environ.get(BACKEND_VARIABLE, "").strip())


def describe_backend() -> str:
    """The backend with what matters about it, such as "native avx2"."""
    backend = kernel_backend()
    return f"native {cpu_library.instruction_set()}" if backend == "cpu" else backend


def set_num_threads(num_threads: int) -> None:
    """Gives the backend in use that many threads, and torch one where another backend does the work.

    Two pools that wait for each other by spinning would take each other's cores.
    """
    if kernel_backend() == "cpu":
        cpu_library.set_num_threads(num_threads)
        num_threads = 1
    torch.set_num_threads(num_threads)


@contextmanager
def one_core_left() -> Iterator[None]:
    """Inside, native kernels use a thread less, if they have several: something else takes as long as they do.

    Both at its beginning and at its end it waits for what they are computing.
    """
    num_threads = cpu_library.num_threads() if kernel_backend() == "cpu" else 1
    if num_threads == 1:
        yield
        return
    cpu_library.set_num_threads(num_threads - 1)
    try:
        yield
    finally:
        cpu_library.set_num_threads(num_threads)


@functools.cache
def _backend() -> ModuleType:
    if kernel_backend() != "triton":
        return reference
    from kernels.triton import operations  # only here: triton is missing on many machines

    return operations


def _sampling_backend(logits: torch.Tensor) -> ModuleType:
    if (backend := _backend()) is not reference:
        return backend
    return _host_sampling(os.environ.get(BACKEND_VARIABLE)) if logits.is_cpu else reference_sampling


@functools.cache
def _host_sampling(forced: str | None) -> ModuleType:
    # What the variable says is part of the key: a sampler is asked for in every step, and the backend is slow to tell.
    return cpu_sampling if kernel_backend() == "cpu" else reference_sampling


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, times `weight`: [..., n] and [n] -> [..., n].

    With `residual`, x is first added to it in place, and the sum is what is normalised.
    Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467
    """
    return _backend().rms_norm(x, weight, eps, residual)


def rope_and_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_cache: KVLayer,
    slot_mapping: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotates queries and keys by their positions, writes keys and values to the cache, returns the queries.

    qkv [num_tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
    cos, sin [num_tokens, rotary_dim], 0 <= rotary_dim <= head_dim: angle j and j + rotary_dim / 2 are the
    same, and the first half of sin is negated. Pairs are (j, j + rotary_dim / 2), as in Hugging Face models.
    With `q_norm` and `k_norm` [head_dim], both or neither, every query and key is first normalised as `rms_norm`
    does. slot_mapping int64 [num_tokens]. Result [num_tokens, num_heads, head_dim].
    Su et al. 2021, https://arxiv.org/abs/2104.09864; Dehghani et al. 2023, https://arxiv.org/abs/2302.05442
    """
    return _backend().rope_and_write_kv(qkv, cos, sin, kv_cache, slot_mapping, q_norm, k_norm, eps)


def paged_attention(
    q: torch.Tensor,
    kv_cache: KVLayer,
    metadata: AttentionMetadata,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a ragged batch over keys and values in blocks.

    q [num_tokens, num_heads, head_dim], sequences one after another as in `metadata`; kv_cache already
    holds this step's tokens; num_heads is a multiple of num_kv_heads, neighbours sharing a KV head. A query
    at position p sees the keys k <= p, and with `window` only those with k > p - window. `soft_cap` bounds
    the scores to (-c, c) by c * tanh(s / c) before the mask. `sinks` float32 [num_heads] is one more score
    of each head, neither scaled nor masked, that takes its share of the softmax and has no value.
    Result [num_tokens, num_heads, head_dim].
    Kwon et al. 2023, https://arxiv.org/abs/2309.06180; Xiao et al. 2023, https://arxiv.org/abs/2309.17453
    """
    return _backend().paged_attention(q, kv_cache, metadata, scale, window, soft_cap, sinks)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up for [num_tokens, 2 * n] holding gate, then up: -> [num_tokens, n].

    Shazeer 2020, https://arxiv.org/abs/2002.05202
    """
    return _backend().silu_and_mul(gate_up)


def gelu_tanh_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `silu_and_mul` with the tanh approximation of gelu in silu's place.

    Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415
    """
    return _backend().gelu_tanh_and_mul(gate_up)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), gate at most `limit` and up within it: shapes as `silu_and_mul`.

    The experts' activation of gpt-oss, https://arxiv.org/abs/2508.10925
    """
    return _backend().clamped_swiglu(gate_up, alpha, limit)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x @ weight.T for x [num_tokens, in] and a dense weight [out, in] of the same dtype: [num_tokens, out].

    The result may be a strided view.
    """
    return _backend().linear(x, weight)


def quantized_linear(x: torch.Tensor, packed: torch.Tensor, tensor_type: str) -> torch.Tensor:
    """x @ weight.T for packed rows uint8 [out, row_bytes] of a format in QUANTIZED_FORMATS: [num_tokens, out].

    Raises ValueError for an unknown format or rows of the wrong length.
    """
    return _backend().quantized_linear(x, packed, tensor_type)


def dequantize(packed: torch.Tensor, tensor_type: str, out: torch.Tensor) -> torch.Tensor:
    """Unpacks rows uint8 [num_rows, row_bytes] into `out` [num_rows, row_elements] and returns it.

    Rounds as `gguf.quants` does: the scaled value, then the offset, each in float32.
    Raises ValueError for an unknown format or rows of the wrong length.
    """
    return _backend().dequantize(packed, tensor_type, out)


def adjust_logits(logits: torch.Tensor, batch: SamplingBatch) -> None:
    """Adds the batch's cells to float32 logits [num_rows, vocab_size], then applies its penalties; in place.

    The logits may be a view of wider ones, strides (>= vocab_size, 1). Rows without a slot have no penalties. Of a
    token with a count in prompt and output a positive logit is divided by `repetition`, any other multiplied;
    then a token with a count in the output loses presence + frequency * count.
    Keskar et al. 2019, https://arxiv.org/abs/1909.05858
    """
    if batch.cells is not None or batch.penalties is not None:
        _sampling_backend(logits).adjust_logits(logits, batch)


def sample(
    logits: torch.Tensor, batch: SamplingBatch, probs: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draws a token for each row of adjusted float32 logits [num_rows, vocab_size], which stay as they are.

    The logits may be a view of wider ones, strides (>= vocab_size, 1). At temperature 0 it is the likeliest token,
    the first of equals. Otherwise temperature, min-p, top-k and top-p are applied in this order, with
    `temperature_last` the temperature after them. Each filter is a threshold on probability: tokens that tie with
    the last one kept are kept, and so is the likeliest always; top-p counts what the others kept as one. The
    cumulative distribution, summed in the vocabulary's order and in more than float32's precision, is inverted
    at the row's uniform number, so that no row depends on the others.

    `probs` float32 [num_rows, vocab_size], if given, receives the distributions drawn from, one-hot where greedy.
    Returns token ids int64 [num_rows] and whether each row was healthy, bool [num_rows]: without NaN and of a
    finite maximum. A row that is not gets token 0 and probabilities that mean nothing.
    Holtzman et al. 2020, https://arxiv.org/abs/1904.09751; Nguyen et al. 2024, https://arxiv.org/abs/2407.01082
    """
    return _sampling_backend(logits).sample(logits, batch, probs)


def verify_drafts(
    logits: torch.Tensor,
    batch: SamplingBatch,
    draft_ids: torch.Tensor,
    draft_probs: torch.Tensor,
    accept_uniforms: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Decides about drafts that were drawn, and draws what takes their place; otherwise as `sample`.

    draft_ids int64 [num_rows], -1 where none; draft_probs q float32 [num_rows, vocab_size], read only in rows with
    a draft, are what those were drawn from; accept_uniforms float64 [num_rows] in [0, 1) decide.
    With p as `sample` gives it, draft d is accepted if uniform * q(d) < p(d). Returns accepted bool [num_rows],
    token ids int64 [num_rows] and healthy bool [num_rows]. The token of a row with a draft is drawn, with the
    batch's uniforms and whether it was accepted or not, from max(p - q, 0), or from p where nothing is left of it;
    that of a row without as `sample` does. A row that is not healthy accepts nothing and gets token 0.
    Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al. 2023, https://arxiv.org/abs/2302.01318
    """
    return _sampling_backend(logits).verify_drafts(logits, batch, draft_ids, draft_probs, accept_uniforms)
