"""Fused Triton kernels of the encoders, for training and inference.

The module that calls a kernel also has an implementation in plain torch. `available.use_kernels`
chooses: kernels on CUDA if Triton is installed (torch's CUDA wheels for Linux include it), and
plain torch on other devices, under torch.compile, and in float64.
"""
