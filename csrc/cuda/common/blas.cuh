// Matrix products by the cuBLAS that torch has loaded, on torch's handle: its stream, its workspace
// and its choice of TF32. Nothing is linked: names are looked up at run time, as the stream is.
#pragma once

#include <climits>

#include "cuda/common/blas_library.cuh"
#include "cuda/common/view.cuh"

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
inline Matrix matrix_of(const View& view) {
  return {view.data_ptr(), view.scalar_type(), view.size(view.dim() - 1)};
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

// The factors of a product or what is there already times 1 or 0, in the type of its sums.
struct Scale {
  Scale(ScalarType out, bool one) : single(one ? 1 : 0), wide(one ? 1 : 0), type(out) {}
  const void* data() const {
    return type == ScalarType::Double ? static_cast<const void*>(&wide) : &single;
  }

  float single;
  double wide;
  ScalarType type;
};

class Blas {
 public:
  // For the device that is current, on its current stream, which is `stream`.
  explicit Blas(cudaStream_t stream) : library_(BlasLibrary::loaded()), stream_(stream) {
    TORCH_ERROR_CODE_CHECK(library_.current_handle(&handle_));
  }

  // out (m,n) = a (m,k) b (k,n), or += ; for `batch` matrices side by side. 16-bit factors may have
  // an out of float; sums are in float, for double in double.
  void multiply(const Matrix& out, const Matrix& a, const Matrix& b, int64_t m, int64_t n,
                int64_t k, bool add = false, int64_t batch = 1) const {
    const Scale alpha(out.type, true), beta(out.type, add);
    if (m == 0 || n == 0 || batch == 0) return;
    STD_TORCH_CHECK(m <= INT_MAX && n <= INT_MAX && k <= INT_MAX && batch <= INT_MAX,
                    "pruned_rnnt: a matrix product is larger than cuBLAS takes");
    // cuBLAS is column-major: it sees all three transposed, so the factors change places.
    const int status = library_.multiply(
        handle_, b.transposed, a.transposed, static_cast<int>(n), static_cast<int>(m),
        static_cast<int>(k), alpha.data(), b.data, cuda_type(b.type), static_cast<int>(b.stride),
        b.batch_stride, a.data, cuda_type(a.type), static_cast<int>(a.stride), a.batch_stride,
        beta.data(), out.data, cuda_type(out.type), static_cast<int>(out.stride), out.batch_stride,
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

}  // namespace cuda
}  // namespace pruned_rnnt
