// Matrix products by the cuBLAS that torch has loaded, with torch's handle: its stream, workspace
// and choice of TF32. The functions are looked up at run time, so nothing is linked.
#pragma once

#include <climits>

#include "cuda/common/blas_library.cuh"
#include "view.h"

namespace pruned_rnnt::cuda {

// A row-major matrix, or one for each of a batch; `transposed` is how a product reads it.
struct Matrix {
  void* data;
  ScalarType type;
  int64_t stride;  // of rows
  bool transposed = false;
  int64_t batch_stride = 0;

  Matrix t() const { return {data, type, stride, !transposed, batch_stride}; }
};

// The last dimension is columns, all others are rows.
inline Matrix matrix_of(const View& view) {
  return {view.data_ptr(), view.scalar_type(), view.size(view.dim() - 1)};
}

inline cudaDataType_t cuda_type(ScalarType type) {
  return type == ScalarType::Float    ? CUDA_R_32F
         : type == ScalarType::Double ? CUDA_R_64F
         : type == ScalarType::Half   ? CUDA_R_16F
                                      : CUDA_R_16BF;
}

// The scalar 1 or 0 of a matrix product, in the type of its sums.
inline const void* product_scalar(ScalarType out, bool one) {
  static constexpr float single[] = {0, 1};
  static constexpr double wide[] = {0, 1};
  return out == ScalarType::Double ? static_cast<const void*>(&wide[one]) : &single[one];
}

class Blas {
 public:
  // For the current device; `stream` is its current stream.
  explicit Blas(cudaStream_t stream) : library_(BlasLibrary::loaded()), stream_(stream) {
    TORCH_ERROR_CODE_CHECK(library_.current_handle(&handle_));
  }

  // out (m,n) = a (m,k) b (k,n), or +=, for `batch` matrices. 16-bit factors may have a float out;
  // sums are in float, for double in double.
  void multiply(const Matrix& out, const Matrix& a, const Matrix& b, int64_t m, int64_t n,
                int64_t k, bool add = false, int64_t batch = 1) const {
    if (m == 0 || n == 0 || batch == 0) return;
    STD_TORCH_CHECK(m <= INT_MAX && n <= INT_MAX && k <= INT_MAX && batch <= INT_MAX,
                    "pruned_rnnt: a matrix product is larger than cuBLAS takes");
    // cuBLAS is column-major and sees all three transposed, so the factors are swapped.
    const int status = library_.multiply(
        handle_, b.transposed, a.transposed, static_cast<int>(n), static_cast<int>(m),
        static_cast<int>(k), product_scalar(out.type, true), b.data, cuda_type(b.type),
        static_cast<int>(b.stride), b.batch_stride, a.data, cuda_type(a.type),
        static_cast<int>(a.stride), a.batch_stride, product_scalar(out.type, add), out.data,
        cuda_type(out.type), static_cast<int>(out.stride), out.batch_stride,
        static_cast<int>(batch), out.type == ScalarType::Double ? kCompute64F : kCompute32F,
        kDefaultAlgorithm);
    STD_TORCH_CHECK(status == 0, "pruned_rnnt: cuBLAS failed with status ", status);
  }

  // out (m,n) = a (m,k) b (k,n) + bias (n), all of one type; the bias is added before rounding.
  void multiply_add_bias(const Matrix& out, const View& bias, const Matrix& a, const Matrix& b,
                         int64_t m, int64_t n, int64_t k) const;

 private:
  const BlasLibrary& library_;
  cudaStream_t stream_;
  void* handle_ = nullptr;
};

}  // namespace pruned_rnnt::cuda
