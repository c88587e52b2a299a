"""Weights as they lie in memory: dense or packed, all behind `QuantWeight`."""

from engine.quantization.affine import AffineMatrix as AffineMatrix
from engine.quantization.affine import AffineWeight as AffineWeight
from engine.quantization.base import QuantWeight as QuantWeight
from engine.quantization.dense import DenseWeight as DenseWeight
from engine.quantization.ggml import GGMLWeight as GGMLWeight
from engine.quantization.stacked import StackedWeight as StackedWeight
