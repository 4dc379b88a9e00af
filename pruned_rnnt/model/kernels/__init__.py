"""Fused Triton kernels of the encoders' training step.

Each has a plain torch twin in the module that calls it. `available.use_kernels` chooses:
the kernels on CUDA where Triton is installed (torch's CUDA wheels for Linux bring it), the twins
everywhere else, under torch.compile, and in float64.
"""
