// The functions of cuBLAS and cuBLASLt, looked up at run time in the libraries that torch has
// loaded. Types and constants are those of cublas_api.h and cublasLt.h, headers that nvcc does not
// include.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <library_types.h>

#include "stable.h"

namespace pruned_rnnt::cuda {

// cublasComputeType_t, cublasGemmAlgo_t, cublasMath_t.
constexpr int kCompute32F = 68, kComputeTF32 = 77, kCompute64F = 70, kDefaultAlgorithm = -1;
constexpr int kTF32Math = 3;
// cublasLtMatmulDescAttributes_t, cublasLtEpilogue_t, cublasLtMatmulPreferenceAttributes_t.
constexpr int kTransposeA = 3, kTransposeB = 4, kEpilogue = 7, kBiasPointer = 8;
constexpr uint32_t kEpilogueBias = 4;
constexpr int kAlignmentA = 5, kAlignmentB = 6, kAlignmentC = 7, kAlignmentD = 8;

// cublasLtMatmulHeuristicResult_t.
struct LtHeuristic {
  uint64_t algorithm[8];
  size_t workspace_bytes;
  int status;
  float waves;
  int reserved[4];
};

// A function of libtorch_cuda or of a library that it depends on, as any type of function pointer.
struct TorchFunction {
  explicit TorchFunction(const char* name) {
    static void* const torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    address = torch_cuda != nullptr ? dlsym(torch_cuda, name) : nullptr;
    STD_TORCH_CHECK(address != nullptr, "pruned_rnnt: the loaded torch has no ", name);
  }
  template <typename Function>
  operator Function*() const {
    return reinterpret_cast<Function*>(address);
  }

  void* address;
};

struct BlasLibrary {
  AOTITorchError (*current_handle)(void** handle) =
      TorchFunction("torch_get_current_cuda_blas_handle");
  int (*multiply)(void* handle, int transa, int transb, int m, int n, int k, const void* alpha,
                  const void* a, cudaDataType_t a_type, int lda, long long a_stride, const void* b,
                  cudaDataType_t b_type, int ldb, long long b_stride, const void* beta, void* c,
                  cudaDataType_t c_type, int ldc, long long c_stride, int batch, int compute,
                  int algorithm) = TorchFunction("cublasGemmStridedBatchedEx");
  int (*get_math_mode)(void* handle, int* mode) = TorchFunction("cublasGetMathMode");

  int (*create_product)(void** product, int compute,
                        cudaDataType_t scale) = TorchFunction("cublasLtMatmulDescCreate");
  int (*set_product)(void* product, int attribute, const void* value,
                     size_t bytes) = TorchFunction("cublasLtMatmulDescSetAttribute");
  int (*destroy_product)(void* product) = TorchFunction("cublasLtMatmulDescDestroy");
  int (*create_layout)(void** layout, cudaDataType_t type, uint64_t rows, uint64_t columns,
                       int64_t stride) = TorchFunction("cublasLtMatrixLayoutCreate");
  int (*destroy_layout)(void* layout) = TorchFunction("cublasLtMatrixLayoutDestroy");
  int (*create_preference)(void** preference) = TorchFunction("cublasLtMatmulPreferenceCreate");
  int (*set_preference)(void* preference, int attribute, const void* value,
                        size_t bytes) = TorchFunction("cublasLtMatmulPreferenceSetAttribute");
  int (*destroy_preference)(void* preference) = TorchFunction("cublasLtMatmulPreferenceDestroy");
  int (*choose)(void* handle, void* product, void* a, void* b, void* c, void* d, void* preference,
                int requested, LtHeuristic* results,
                int* found) = TorchFunction("cublasLtMatmulAlgoGetHeuristic");
  int (*run)(void* handle, void* product, const void* alpha, const void* a, void* a_layout,
             const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
             void* d, void* d_layout, const uint64_t* algorithm, void* workspace,
             size_t workspace_bytes, cudaStream_t stream) = TorchFunction("cublasLtMatmul");

  static const BlasLibrary& loaded() {
    static const BlasLibrary library;
    return library;
  }
};

}  // namespace pruned_rnnt::cuda
