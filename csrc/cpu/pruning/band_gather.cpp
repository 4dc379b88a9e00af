// band_gather: the band's columns of a (N,U+1,D) tensor for every frame, and the sum back.
//
// Axes: N utterances, T frames, U symbols, S columns of the band, D features.
#include <vector>

#include "contracts/pruning.h"
#include "cpu/common/fresh_memory.h"
#include "cpu/common/parallel.h"
#include "cpu/common/rows.h"
#include "op.h"

namespace pruned_rnnt {
namespace {

// lm (N,U+1,D), start (N,T) -> out (N,T,S,D); columns outside 0..U are 0.
void band_gather(const View& lm, const View& start, int64_t s_range, const View& out) {
  const int64_t positions = lm.size(1), D = lm.size(2), T = start.size(1), S = s_range;
  const int32_t* first = data_of<int32_t>(start);
  dispatch_floating(lm.scalar_type(), "band_gather", [&](auto zero) {
    using scalar = decltype(zero);
    const scalar* source = data_of<scalar>(lm);
    scalar* target = mutable_data_of<scalar>(out);
    expect_full_write(out);
    parallel_tasks(start.numel(), rows_per_task(S * D), [&](int64_t begin, int64_t end) {
      for (int64_t frame = begin; frame < end; ++frame) {
        const int64_t u = first[frame];
        const int64_t from = std::min(S, std::max<int64_t>(-u, 0));
        const int64_t until = std::max(from, std::min(S, positions - u));
        const scalar* rows = source + ((frame / T) * positions + u) * D;
        scalar* columns = target + frame * S * D;
        std::fill(columns, columns + from * D, scalar(0.0f));
        std::copy(rows + from * D, rows + until * D, columns + from * D);
        std::fill(columns + until * D, columns + S * D, scalar(0.0f));
      }
    });
  });
}

struct AddRow {
  template <typename real, typename scalar>
  static PRUNED_RNNT_INLINE void run(const scalar* x, int64_t size, real* sum) {
#pragma omp simd
    for (int64_t d = 0; d < size; ++d) sum[d] += static_cast<real>(x[d]);
  }
};

// grad (N,T,S,D), start (N,T) -> grad_lm (N,U+1,D). Rows are added in the order of their frames, so
// the sum does not depend on the number of threads.
void band_gather_backward(const View& grad, const View& start, const View& grad_lm) {
  const int64_t positions = grad_lm.size(1), D = grad_lm.size(2), T = start.size(1);
  const int64_t S = grad.size(2), N = start.size(0);
  const int32_t* first = data_of<int32_t>(start);
  dispatch_floating(grad.scalar_type(), "band_gather_backward", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const scalar* source = data_of<scalar>(grad);
    scalar* target = mutable_data_of<scalar>(grad_lm);
    parallel_tasks(N * positions, 1, [&](int64_t begin, int64_t end) {
      std::vector<real> sum(D);
      for (int64_t task = begin; task < end; ++task) {
        const int64_t n = task / positions, u = task % positions;
        std::fill(sum.begin(), sum.end(), real(0));
        for (int64_t frame = n * T; frame < (n + 1) * T; ++frame) {
          const int64_t j = u - first[frame];
          if (j < 0 || j >= S) continue;
          run_vectorised<AddRow>(source + (frame * S + j) * D, D, sum.data());
        }
        std::transform(sum.begin(), sum.end(), target + task * D,
                       [](real value) { return static_cast<scalar>(value); });
      }
    });
  });
}

PRUNED_RNNT_CPU_OP(band_gather)
PRUNED_RNNT_CPU_OP(band_gather_backward)

}  // namespace
}  // namespace pruned_rnnt
