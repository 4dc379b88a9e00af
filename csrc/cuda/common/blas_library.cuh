// The functions of cuBLAS and cuBLASLt that are used, found at run time in what torch has loaded.
// Their types and constants are those of cublas_api.h and cublasLt.h, whose headers come with
// cuBLAS and not with nvcc.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <library_types.h>

#include "stable.h"

namespace pruned_rnnt {
namespace cuda {

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

struct BlasLibrary {
  AOTITorchError (*current_handle)(void** handle);
  int (*multiply)(void* handle, int transa, int transb, int m, int n, int k, const void* alpha,
                  const void* a, cudaDataType_t a_type, int lda, long long a_stride, const void* b,
                  cudaDataType_t b_type, int ldb, long long b_stride, const void* beta, void* c,
                  cudaDataType_t c_type, int ldc, long long c_stride, int batch, int compute,
                  int algorithm);
  int (*get_math_mode)(void* handle, int* mode);

  int (*create_product)(void** product, int compute, cudaDataType_t scale);
  int (*set_product)(void* product, int attribute, const void* value, size_t bytes);
  int (*destroy_product)(void* product);
  int (*create_layout)(void** layout, cudaDataType_t type, uint64_t rows, uint64_t columns,
                       int64_t stride);
  int (*destroy_layout)(void* layout);
  int (*create_preference)(void** preference);
  int (*set_preference)(void* preference, int attribute, const void* value, size_t bytes);
  int (*destroy_preference)(void* preference);
  int (*choose)(void* handle, void* product, void* a, void* b, void* c, void* d, void* preference,
                int requested, LtHeuristic* results, int* found);
  int (*run)(void* handle, void* product, const void* alpha, const void* a, void* a_layout,
             const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
             void* d, void* d_layout, const uint64_t* algorithm, void* workspace,
             size_t workspace_bytes, cudaStream_t stream);

  static const BlasLibrary& loaded() {
    static const BlasLibrary library = [] {
      BlasLibrary x{};
      find(x.current_handle, "torch_get_current_cuda_blas_handle");
      find(x.multiply, "cublasGemmStridedBatchedEx");
      find(x.get_math_mode, "cublasGetMathMode");
      find(x.create_product, "cublasLtMatmulDescCreate");
      find(x.set_product, "cublasLtMatmulDescSetAttribute");
      find(x.destroy_product, "cublasLtMatmulDescDestroy");
      find(x.create_layout, "cublasLtMatrixLayoutCreate");
      find(x.destroy_layout, "cublasLtMatrixLayoutDestroy");
      find(x.create_preference, "cublasLtMatmulPreferenceCreate");
      find(x.set_preference, "cublasLtMatmulPreferenceSetAttribute");
      find(x.destroy_preference, "cublasLtMatmulPreferenceDestroy");
      find(x.choose, "cublasLtMatmulAlgoGetHeuristic");
      find(x.run, "cublasLtMatmul");
      return x;
    }();
    return library;
  }

 private:
  template <typename Function>
  static void find(Function& function, const char* name) {
    // Finds what libtorch_cuda itself depends on, too.
    static void* const torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol = torch_cuda != nullptr ? dlsym(torch_cuda, name) : nullptr;
    STD_TORCH_CHECK(symbol != nullptr, "pruned_rnnt: the loaded torch has no ", name);
    function = reinterpret_cast<Function>(symbol);
  }
};

}  // namespace cuda
}  // namespace pruned_rnnt
