// fused_log_probs: hidden rows, logits and log-probabilities of one chunk of rows after the other.
// Contract: pruned_rnnt/ops/joiner/fused_log_probs.py, whose loop calls the same kernels: from here
// a launch takes the host a few microseconds, so that chunks may be small enough for the cache.
#include <vector>

#include "args/joiner.h"
#include "contracts/joiner.h"
#include "cuda/common/ops.cuh"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;

// The first K columns of rows `pitch` elements apart.
template <typename scalar>
__global__ void __launch_bounds__(kThreads)
    widen_columns_kernel(const scalar* __restrict__ x, int64_t pitch, int64_t rows, int32_t K,
                         acc_type<scalar>* __restrict__ out) {
  const int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < rows * K) out[i] = static_cast<acc_type<scalar>>(x[i / K * pitch + i % K]);
}

}  // namespace

void fused_log_probs(const Launcher& launch, const JoinerInputs& inputs, const LatticeRows& lattice,
                     const JoinerOptions& options, const Workspace& workspace,
                     const RowLogProbs& out, const OptionalView& duration_logits) {
  const View &hidden = workspace.hidden, &logits = workspace.logits;
  const View weight(inputs.weight), bias(inputs.bias);
  const int64_t D = hidden.size(1), columns = logits.size(1);
  const auto first_of = [](const View& rows, int64_t count, int64_t columns) {
    return View(rows.data_ptr(), rows.scalar_type(), 2, {count, columns}, {rows.stride(0), 1});
  };
  // The chunk of the first rows comes last: the backward pass begins with it.
  for (size_t chunk = options.chunk_offsets.size(); --chunk > 0;) {
    const int64_t begin = options.chunk_offsets[chunk - 1],
                  count = options.chunk_offsets[chunk] - begin;
    if (count == 0) continue;
    joiner_rows(launch, inputs.am, inputs.lm, lattice, begin, options.activation,
                first_of(hidden, count, D));
    if (options.counts_rows) {
      const View transposed(weight.data_ptr(), weight.scalar_type(), 2, {D, columns}, {1, D});
      const View total(
          mutable_data_of<int64_t>(*lattice.row_splits) + lattice.row_splits->size(0) - 1,
          lattice.row_splits->scalar_type(), 0, {}, {});
      counted_rows_product(launch, first_of(hidden, count, D), transposed, bias, total, begin,
                           first_of(logits, count, columns));
    } else {
      launch.blas().multiply_add_bias(matrix_of(logits), bias, matrix_of(hidden),
                                      matrix_of(weight).t(), count, columns, D);
    }
    log_probs(launch, first_of(logits, count, options.vocabulary), inputs.targets, lattice, begin,
              options.blank, options.mode, out);
    if (!duration_logits.has_value()) continue;
    const int64_t K = duration_logits->size(1);
    dispatch_floating(logits.scalar_type(), "fused_log_probs", [&](auto zero) {
      using scalar = decltype(zero);
      launch(widen_columns_kernel<scalar>, uint32_t((count * K + kThreads - 1) / kThreads),
             kThreads, 0, data_of<scalar>(logits) + options.vocabulary, columns, count, int32_t(K),
             mutable_data_of<acc_type<scalar>>(*duration_logits) + begin * K);
    });
  }
}

PRUNED_RNNT_CUDA_OP(fused_log_probs)

}  // namespace pruned_rnnt::cuda
