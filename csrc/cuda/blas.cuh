// Matrix products by the cuBLAS that torch has loaded, on torch's handle: its stream, its workspace
// and its choice of TF32. Nothing is linked: names are looked up at run time, as the stream is.
#pragma once

#include <library_types.h>

#include <climits>

#include "cuda/launch.cuh"

namespace pruned_rnnt {
namespace cuda {

// A row-major matrix, or one for each of a batch; `transposed` is how a product reads it.
struct Matrix {
  void* data;
  ScalarType type;
  int64_t stride;  // of rows
  bool transposed = false;
  int64_t batch_stride = 0;

  Matrix t() const { return {data, type, stride, !transposed, batch_stride}; }
};

// The last dimension are columns, all before it rows.
inline Matrix matrix_of(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.scalar_type(), tensor.size(tensor.dim() - 1)};
}

inline cudaDataType_t cuda_type(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
      return CUDA_R_32F;
    case ScalarType::Double:
      return CUDA_R_64F;
    case ScalarType::Half:
      return CUDA_R_16F;
    default:
      return CUDA_R_16BF;
  }
}

class Blas {
 public:
  // For the device that is current.
  Blas() : multiply_(lookup().multiply), addmm_(lookup().addmm) {
    TORCH_ERROR_CODE_CHECK(lookup().handle(&handle_));
  }

  // out (m,n) = a (m,k) b (k,n), or += ; for `batch` matrices side by side. 16-bit factors may have
  // an out of float; sums are in float, for double in double.
  void multiply(const Matrix& out, const Matrix& a, const Matrix& b, int64_t m, int64_t n,
                int64_t k, bool add = false, int64_t batch = 1) const {
    if (m == 0 || n == 0 || batch == 0) return;
    STD_TORCH_CHECK(m <= INT_MAX && n <= INT_MAX && k <= INT_MAX && batch <= INT_MAX,
                    "pruned_rnnt: a matrix product is larger than cuBLAS takes");
    // cuBLAS is column-major: it sees all three transposed, so the factors change places.
    const float one = 1, beta = add ? 1 : 0;
    const double wide_one = 1, wide_beta = add ? 1 : 0;
    const bool wide = out.type == ScalarType::Double;
    const void* alpha_of = wide ? static_cast<const void*>(&wide_one) : &one;
    const void* beta_of = wide ? static_cast<const void*>(&wide_beta) : &beta;
    const int status = multiply_(
        handle_, b.transposed, a.transposed, static_cast<int>(n), static_cast<int>(m),
        static_cast<int>(k), alpha_of, b.data, cuda_type(b.type), static_cast<int>(b.stride),
        b.batch_stride, a.data, cuda_type(a.type), static_cast<int>(a.stride), a.batch_stride,
        beta_of, out.data, cuda_type(out.type), static_cast<int>(out.stride), out.batch_stride,
        static_cast<int>(batch), wide ? kCompute64F : kCompute32F, kDefaultAlgorithm);
    STD_TORCH_CHECK(status == 0, "pruned_rnnt: cuBLAS failed with status ", status);
  }

  // out (m,n) = a (m,k) b (k,n) + bias (n), tensors of one dtype; torch's own, which adds the bias
  // while it stores.
  void multiply_add_bias(const Tensor& out, const Tensor& bias, const Tensor& a,
                         const Tensor& b) const {
    TORCH_ERROR_CODE_CHECK(addmm_(out.get(), bias.get(), a.get(), b.get(), 1.0, 1.0));
  }

 private:
  // Constants of cublas_api.h, whose headers come with cuBLAS and not with nvcc.
  static constexpr int kCompute32F = 68, kCompute64F = 70, kDefaultAlgorithm = -1;

  using Multiply = int (*)(void* handle, int transa, int transb, int m, int n, int k,
                           const void* alpha, const void* a, cudaDataType_t a_type, int lda,
                           long long a_stride, const void* b, cudaDataType_t b_type, int ldb,
                           long long b_stride, const void* beta, void* c, cudaDataType_t c_type,
                           int ldc, long long c_stride, int batch, int compute, int algorithm);
  using AddMM = AOTITorchError (*)(AtenTensorHandle out, AtenTensorHandle self, AtenTensorHandle a,
                                   AtenTensorHandle b, double beta, double alpha);
  using Handle = AOTITorchError (*)(void** handle);

  struct Names {
    Multiply multiply;
    AddMM addmm;
    Handle handle;
  };

  static const Names& lookup() {
    static const Names names = [] {
      // Finds what libtorch_cuda itself depends on, too.
      void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
      const auto find = [&](const char* name) {
        void* symbol = torch_cuda != nullptr ? dlsym(torch_cuda, name) : nullptr;
        STD_TORCH_CHECK(symbol != nullptr, "pruned_rnnt: the loaded torch has no ", name);
        return symbol;
      };
      return Names{reinterpret_cast<Multiply>(find("cublasGemmStridedBatchedEx")),
                   reinterpret_cast<AddMM>(find("aoti_torch_cuda_addmm_out")),
                   reinterpret_cast<Handle>(find("torch_get_current_cuda_blas_handle"))};
    }();
    return names;
  }

  Multiply multiply_;
  AddMM addmm_;
  void* handle_ = nullptr;
};

}  // namespace cuda
}  // namespace pruned_rnnt
