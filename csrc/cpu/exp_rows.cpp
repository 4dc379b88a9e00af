// exp_rows: each row's maximum, and the exponentials of the row less that maximum. Contract:
// pruned_rnnt/ops/simple_log_probs.py.
#include "cpu/fresh_memory.h"
#include "cpu/parallel.h"
#include "cpu/rows.h"

namespace pruned_rnnt {
namespace {

struct ExpRow {
  template <typename scalar, typename real>
  static PRUNED_RNNT_INLINE real run(const scalar* x, int64_t size, real* x_exp) {
    const real shift = finite_or_zero(row_maximum<real>(x, size));
#pragma omp simd
    for (int64_t v = 0; v < size; ++v) {
      x_exp[v] = exp_of_nonpositive(static_cast<real>(x[v]) - shift);
    }
    return shift;
  }
};

// x (N,L,V) -> row_max (N,L), x_exp (N,L,V); rows from lengths[n] + extra on are 0, unread.
void exp_rows(const Tensor& x, const Tensor& lengths, int64_t extra, const Tensor& row_max,
              const Tensor& x_exp) {
  const int64_t N = x.size(0), L = x.size(1), V = x.size(2);
  const int32_t* used = data_of<int32_t>(lengths);
  dispatch_floating(x.scalar_type(), "exp_rows", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const scalar* input = data_of<scalar>(x);
    real* maxima = mutable_data_of<real>(row_max);
    real* output = mutable_data_of<real>(x_exp);
    expect_full_write(x_exp, sizeof(real));
    parallel_tasks(N * L, rows_per_task(V), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (r % L >= used[r / L] + extra) {
          maxima[r] = 0;
          std::fill(output + r * V, output + (r + 1) * V, real(0));
          continue;
        }
        maxima[r] = run_vectorised<ExpRow>(input + r * V, V, output + r * V);
      }
    });
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CPU, m) { m.impl("exp_rows", TORCH_BOX(&exp_rows)); }

}  // namespace pruned_rnnt
