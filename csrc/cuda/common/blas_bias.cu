// Blas::multiply_add_bias by cuBLASLt, which adds the bias for free while it stores the product.
#include "cuda/common/blas.cuh"

namespace pruned_rnnt::cuda {
namespace {

void check_blas(int status) {
  STD_TORCH_CHECK(status == 0, "pruned_rnnt: cuBLASLt failed with status ", status);
}

// Owns an object of cuBLASLt.
class Owned {
 public:
  using Destroy = int (*)(void*);
  template <typename... Parameters, typename... Arguments>
  Owned(Destroy destroy, int (*create)(void**, Parameters...), Arguments... arguments)
      : destroy_(destroy) {
    check_blas(create(&object_, static_cast<Parameters>(arguments)...));
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { destroy_(object_); }
  void* get() const { return object_; }

 private:
  Destroy destroy_;
  void* object_ = nullptr;
};

// The largest power of two up to 256 that divides an address.
uint32_t alignment_of(const void* data) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(data) | 256;
  return uint32_t(address & (~address + 1));
}

}  // namespace

void Blas::multiply_add_bias(const Matrix& out, const View& bias, const Matrix& a, const Matrix& b,
                             int64_t m, int64_t n, int64_t k) const {
  if (m == 0 || n == 0) return;
  const BlasLibrary& lt = library_;
  const bool wide = out.type == ScalarType::Double;
  int math = 0;
  check_blas(lt.get_math_mode(handle_, &math));
  const bool tf32 = out.type == ScalarType::Float && math == kTF32Math;
  const Owned product(lt.destroy_product, lt.create_product,
                      wide   ? kCompute64F
                      : tf32 ? kComputeTF32
                             : kCompute32F,
                      wide ? CUDA_R_64F : CUDA_R_32F);
  const auto set = [&](int attribute, auto value) {
    check_blas(lt.set_product(product.get(), attribute, &value, sizeof(value)));
  };
  // cuBLASLt is column-major: all three matrices are transposed, and the bias is a column.
  set(kTransposeA, int32_t(b.transposed));
  set(kTransposeB, int32_t(a.transposed));
  set(kEpilogue, kEpilogueBias);
  set(kBiasPointer, bias.data_ptr());
  const auto layout = [&](const Matrix& x, int64_t rows, int64_t columns) {
    if (x.transposed) std::swap(rows, columns);
    return Owned(lt.destroy_layout, lt.create_layout, cuda_type(x.type), columns, rows, x.stride);
  };
  const Owned first = layout(b, k, n), second = layout(a, m, k), result = layout(out, m, n);
  const Owned preference(lt.destroy_preference, lt.create_preference);
  const auto prefer = [&](int attribute, uint32_t value) {
    check_blas(lt.set_preference(preference.get(), attribute, &value, sizeof(value)));
  };
  prefer(kAlignmentA, alignment_of(b.data));
  prefer(kAlignmentB, alignment_of(a.data));
  prefer(kAlignmentC, alignment_of(out.data));
  // The library has no preference for the bias, and its epilogues load it with this alignment.
  prefer(kAlignmentD, std::min(alignment_of(out.data), alignment_of(bias.data_ptr())));
  LtHeuristic chosen{};
  int found = 0;
  // cuBLASLt caches the heuristic's result.
  check_blas(lt.choose(handle_, product.get(), first.get(), second.get(), result.get(),
                       result.get(), preference.get(), 1, &chosen, &found));
  STD_TORCH_CHECK(found > 0, "pruned_rnnt: cuBLASLt has no product of ", m, " x ", k, " x ", n);
  check_blas(lt.run(handle_, product.get(), product_scalar(out.type, true), b.data, first.get(),
                    a.data, second.get(), product_scalar(out.type, false), out.data, result.get(),
                    out.data, result.get(), chosen.algorithm, nullptr, 0, stream_));
}

}  // namespace pruned_rnnt::cuda
