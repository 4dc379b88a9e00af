// exp_rows: maximum and log-sum-exp of each row x, and exp(x - max x), here in one part and without
// padding. Contract: pruned_rnnt/ops/simple/simple_products.py.
#include <cmath>

#include "contracts/simple.h"
#include "cpu/common/fresh_memory.h"
#include "cpu/common/parallel.h"
#include "cpu/common/rows.h"
#include "op.h"

namespace pruned_rnnt {
namespace {

struct ExpRow {
  // Returns the maximum, and the sum of x_exp in `sum`.
  template <typename scalar, typename real>
  static PRUNED_RNNT_INLINE real run(const scalar* x, int64_t size, real* x_exp, real* sum) {
    const real shift = finite_or_zero(row_maximum<real>(x, size));
    real total = 0;
#pragma omp simd reduction(+ : total)
    for (int64_t v = 0; v < size; ++v) {
      x_exp[v] = exp_of_nonpositive(static_cast<real>(x[v]) - shift);
      total += x_exp[v];
    }
    *sum = total;
    return shift;
  }
};

// x (N,L,V) -> row_max, row_lse (N,L), x_exp (N,1,L,V). Rows from lengths[n] + extra on are not
// read; their outputs are 0.
void exp_rows(const View& x, const View& lengths, int64_t extra, const View& row_max,
              const View& row_lse, const View& x_exp) {
  const int64_t N = x.size(0), L = x.size(1), V = x.size(2);
  const int32_t* used = data_of<int32_t>(lengths);
  dispatch_floating(x.scalar_type(), "exp_rows", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const scalar* input = data_of<scalar>(x);
    real *maxima = mutable_data_of<real>(row_max), *sums = mutable_data_of<real>(row_lse);
    real* output = mutable_data_of<real>(x_exp);
    expect_full_write(x_exp);
    parallel_tasks(N * L, rows_per_task(V), [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) {
        if (r % L >= used[r / L] + extra) {
          maxima[r] = sums[r] = 0;
          std::fill(output + r * V, output + (r + 1) * V, real(0));
          continue;
        }
        real sum = 0;
        maxima[r] = run_vectorised<ExpRow>(input + r * V, V, output + r * V, &sum);
        sums[r] = maxima[r] + std::log(sum);
      }
    });
  });
}

PRUNED_RNNT_CPU_OP(exp_rows)

}  // namespace
}  // namespace pruned_rnnt
