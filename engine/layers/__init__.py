"""The layers of a decoder. They hold weights and shapes; the arithmetic is `kernels.ops`."""
