"""The operations as Triton kernels for GPUs; `kernels.ops` names and explains them."""
