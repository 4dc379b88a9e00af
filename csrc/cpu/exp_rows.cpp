// exp_rows: each row's maximum, and the exponentials of the row less that maximum.
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace pruned_rnnt {
namespace {

struct ExpRow {
  template <typename scalar, typename real>
  static PRUNED_RNNT_INLINE real run(const scalar* x, int64_t size, real* x_exp) {
    const real shift = finite_or_zero(row_maximum<real>(x, size));
#pragma omp simd
    for (int64_t v = 0; v < size; ++v) x_exp[v] = exp_of(static_cast<real>(x[v]) - shift);
    return shift;
  }
};

// x (R,V) any floating type -> row_max (R), x_exp (R,V) in the accumulator's type.
void exp_rows(const Tensor& x, const Tensor& row_max, const Tensor& x_exp) {
  const int64_t rows = x.size(0), size = x.size(1);
  dispatch_floating(x.scalar_type(), "exp_rows", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const scalar* input = data_of<scalar>(x);
    real* maxima = mutable_data_of<real>(row_max);
    real* output = mutable_data_of<real>(x_exp);
    parallel_tasks(rows, rows_per_task(size), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        maxima[r] = run_vectorised<ExpRow>(input + r * size, size, output + r * size);
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CPU, m) { m.impl("exp_rows", TORCH_BOX(&exp_rows)); }

}  // namespace pruned_rnnt
