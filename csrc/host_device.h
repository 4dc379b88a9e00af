// Marks functions that the CPU and CUDA libraries share.
#pragma once

#ifdef __CUDACC__
#define PRUNED_RNNT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PRUNED_RNNT_HOST_DEVICE inline
#endif
