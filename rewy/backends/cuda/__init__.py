"""Triton kernels for NVIDIA GPUs."""

from rewy.backends.cuda.backend import CudaBackend

backend = CudaBackend()
