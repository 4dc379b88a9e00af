// column_sums: the sums over the rows of a matrix, in an order that depends on its shape alone.
// Contract: pruned_rnnt/ops/common/matrix_products.py.
//
// Axes: R rows, C columns, P parts of the rows.
#include "contracts/rows.h"
#include "cpu/common/parallel.h"
#include "cpu/common/vectorise.h"
#include "op.h"
#include "stable.h"

namespace pruned_rnnt {
namespace {

// Columns of a task: their sums stay in the L1 cache.
constexpr int64_t kColumns = 1024;
constexpr int64_t kRowsAtOnce = 8;

struct SumRows {
  template <typename scalar, typename real>
  static PRUNED_RNNT_INLINE void run(const scalar* x, int64_t stride, int64_t rows, int64_t columns,
                                     real* sums) {
    int64_t r = 0;
    for (; r + kRowsAtOnce <= rows; r += kRowsAtOnce) {
      const scalar* row = x + r * stride;
#pragma omp simd
      for (int64_t c = 0; c < columns; ++c) {
        real sum = sums[c];
        for (int64_t i = 0; i < kRowsAtOnce; ++i) sum += static_cast<real>(row[i * stride + c]);
        sums[c] = sum;
      }
    }
    for (; r < rows; ++r) {
      const scalar* row = x + r * stride;
#pragma omp simd
      for (int64_t c = 0; c < columns; ++c) sums[c] += static_cast<real>(row[c]);
    }
  }
};

void column_sums(const View& x, bool add, const View& partial, const View& sums) {
  const int64_t R = x.size(0), C = x.size(1), P = partial.size(0), stride = x.stride(0);
  const int64_t slices = (C + kColumns - 1) / kColumns, rows_a_part = (R + P - 1) / P;
  dispatch_floating(x.scalar_type(), "column_sums", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const scalar* input = data_of<scalar>(x);
    real *parts = mutable_data_of<real>(partial), *target = mutable_data_of<real>(sums);
    parallel_tasks(P * slices, 1, [&](int64_t task_begin, int64_t task_end) {
      for (int64_t task = task_begin; task < task_end; ++task) {
        const int64_t p = task / slices, from = task % slices * kColumns;
        const int64_t columns = std::min(kColumns, C - from), begin = p * rows_a_part;
        const int64_t rows = std::clamp<int64_t>(R - begin, 0, rows_a_part);
        real* part = parts + p * C + from;
        std::fill(part, part + columns, real(0));
        run_vectorised<SumRows>(input + begin * stride + from, stride, rows, columns, part);
      }
    });
    parallel_tasks(slices, 1, [&](int64_t slice_begin, int64_t slice_end) {
      for (int64_t slice = slice_begin; slice < slice_end; ++slice) {
        const int64_t from = slice * kColumns, columns = std::min(kColumns, C - from);
        if (!add) std::fill(target + from, target + from + columns, real(0));
        run_vectorised<SumRows>(static_cast<const real*>(parts + from), C, P, columns,
                                target + from);
      }
    });
  });
}

PRUNED_RNNT_CPU_OP(column_sums)

}  // namespace
}  // namespace pruned_rnnt
