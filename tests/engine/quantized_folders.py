"""Quantised checkpoints written bit by bit from known integers, as the formats' documentation describes them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

Tensors = dict[str, torch.Tensor]


@dataclass
class Known:
    """A matrix [out, in] whose element (o, i) is (codes[o, i] - zeros[o, group[i]]) * scales[o, group[i]]."""

    codes: np.ndarray
    zeros: np.ndarray
    scales: np.ndarray
    group: np.ndarray

    @property
    def values(self) -> torch.Tensor:
        exact = (self.codes - self.zeros[:, self.group]) * self.scales[:, self.group].astype(np.float64)
        return torch.from_numpy(exact.astype(np.float32))


def known(
    rng: np.random.Generator, out: int, columns: int, bits: int, group_size: int, symmetric: bool = False
) -> Known:
    """Random codes; scales in half precision, such that the values spread as `tiny_llama`'s weights do."""
    groups = -(-columns // group_size)
    middle = 1 << (bits - 1)
    # The lowest and the highest zero point occur too: they are where an offset by one wraps around.
    zeros = np.full((out, groups), middle) if symmetric else rng.integers(0, 2 * middle, (out, groups))
    scales = (rng.uniform(0.5, 1.5, (out, groups)) * 0.5 / middle).astype(np.float16)
    return Known(rng.integers(0, 2 * middle, (out, columns)), zeros, scales, np.arange(columns) // group_size)


def into_words(values: np.ndarray, bits: int) -> np.ndarray:
    """[rows, n] -> int32 [rows, ceil(n * bits / 32)], value j in bits `bits * j` and up of the row's bit string."""
    rows, count = values.shape
    per_word = 32 // bits
    words = np.zeros((rows, -(-count // per_word)), dtype=np.uint64)
    for column in range(count):
        words[:, column // per_word] |= values[:, column].astype(np.uint64) << np.uint64(bits * (column % per_word))
    return words.astype(np.uint32).view(np.int32)


def tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values))


def gptq(matrix: Known, bits: int, zero_offset: int = 1) -> Tensors:
    """Packed along the inputs; zero points stored less `zero_offset`, 1 in version 1 and 0 in version 2."""
    stored_zeros = (matrix.zeros - zero_offset) % (1 << bits)
    return {
        "qweight": tensor(into_words(matrix.codes, bits).T),
        "qzeros": tensor(into_words(stored_zeros.T, bits)),
        "scales": tensor(matrix.scales.T),
        "g_idx": tensor(matrix.group.astype(np.int32)),
    }


def awq(matrix: Known) -> Tensors:
    """Packed along the outputs, eight at a time, in the order 0, 2, 4, 6, 1, 3, 5, 7."""
    interleaved = [8 * block + place for block in range(len(matrix.codes) // 8) for place in (0, 2, 4, 6, 1, 3, 5, 7)]
    return {
        "qweight": tensor(into_words(matrix.codes.T[:, interleaved], 4)),
        "qzeros": tensor(into_words(matrix.zeros.T[:, interleaved], 4)),
        "scales": tensor(matrix.scales.T),
    }


def packed_compressed_tensors(matrix: Known, bits: int, symmetric: bool, plain_zeros: bool = False) -> Tensors:
    """pack-quantized: codes along the inputs, zero points along the outputs."""
    tensors = {
        "weight_packed": tensor(into_words(matrix.codes, bits)),
        "weight_scale": tensor(matrix.scales),
        "weight_shape": torch.tensor(matrix.codes.shape),
    }
    if not symmetric:
        signed = (matrix.zeros - (1 << (bits - 1))).astype(np.int8)
        packed = into_words(matrix.zeros.T, bits).T
        tensors["weight_zero_point"] = tensor(signed if plain_zeros else packed)
    return tensors


def integer_compressed_tensors(matrix: Known, symmetric: bool) -> Tensors:
    """int-quantized: signed bytes as they are."""
    tensors = {
        "weight": tensor((matrix.codes - 128).astype(np.int8)),
        "weight_scale": tensor(matrix.scales).bfloat16(),
    }
    matrix.scales = tensors["weight_scale"].float().numpy()
    if not symmetric:
        tensors["weight_zero_point"] = tensor((matrix.zeros - 128).astype(np.int8))
    return tensors


def fp8(rng: np.random.Generator, out: int, columns: int, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random finite float8_e4m3 bytes [out, in] and the scale of each block."""
    codes = rng.integers(0, 256, (out, columns)).astype(np.uint8)
    codes[(codes & 0x7F) == 0x7F] ^= 1  # not a number
    scales = rng.uniform(0.5, 1.5, (-(-out // block[0]), -(-columns // block[1]))).astype(np.float32) / 400
    return tensor(codes).view(torch.float8_e4m3fn), tensor(scales)


def float_of_byte(code: int) -> float:
    """A byte of float8_e4m3: sign, four bits of exponent, three of mantissa."""
    sign, exponent, mantissa = -1 if code & 0x80 else 1, code >> 3 & 15, code & 7
    magnitude = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return sign * magnitude


def fp8_values(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    table = np.array([float_of_byte(code) for code in range(256)])
    rows, columns = (np.arange(size) // part for size, part in zip(weight.shape, block))
    exact = table[weight.view(torch.uint8).numpy()] * scales.double().numpy()[np.ix_(rows, columns)]
    return torch.from_numpy(exact.astype(np.float32))


@dataclass
class Quantised:
    """How the modules of a model are packed: `pack(rng, out, columns)` gives tensors and the exact values."""

    config: dict[str, Any]
    pack: Callable[[np.random.Generator, int, int], tuple[Tensors, torch.Tensor]]
    skip: tuple[str, ...] = ("lm_head", "embed_tokens")
    exact: dict[str, torch.Tensor] = field(default_factory=dict)

    def save(self, model: PreTrainedModel, folder: Path) -> PreTrainedModel:
        """Writes the packed checkpoint and returns the model of the values that it stands for."""
        model = copy.deepcopy(model)
        rng = np.random.default_rng(5)
        stored: Tensors = {}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                module, _, kind = name.rpartition(".")
                if parameter.ndim != 2 or kind != "weight" or module.endswith(self.skip):
                    stored[name] = parameter.detach().clone()
                    continue
                tensors, values = self.pack(rng, *parameter.shape)
                stored |= {f"{module}.{suffix}": packed for suffix, packed in tensors.items()}
                self.exact[name] = values
                parameter.copy_(values)
        write_folder(folder, model, stored, self.config)
        return model


def write_folder(folder: Path, model: PreTrainedModel, stored: Tensors, quantization: dict[str, Any]) -> None:
    model.config.save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text()) | {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(values))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
