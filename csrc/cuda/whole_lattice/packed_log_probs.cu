// fitting_splits and packed_log_probs: a packed lattice whose number of rows only the device knows,
// and its log-probabilities. Contracts: pruned_rnnt/ops/joiner/active_joiner.py, whose loop
// calls the same kernels.
//
// Axes: N batch, T frames, S columns, D joiner dim, V' logits, R rows, C rows of a chunk, K chunks.
#include <vector>

#include "contracts/joiner.h"
#include "cuda/whole_lattice/active_ops.cuh"
#include "cuda/whole_lattice/arriving.cuh"
#include "cuda/whole_lattice/grouped_products.cuh"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;

// One warp.
__global__ void __launch_bounds__(32)
    fitting_splits_kernel(const int32_t* __restrict__ logit_lengths,
                          const int32_t* __restrict__ target_lengths, int32_t N, int32_t T,
                          int32_t S, int64_t* __restrict__ row_splits) {
  constexpr unsigned all = 0xffffffffu;
  const int lane = int(threadIdx.x);
  long long before = 0;
  if (lane == 0) row_splits[0] = 0;
  for (int32_t first = 0; first < N; first += 32) {
    const int32_t n = first + lane;
    long long rows = 0;
    if (n < N) {
      const int32_t frames = logit_lengths[n], symbols = target_lengths[n];
      if (frames >= 0 && frames <= T && symbols >= 0 && symbols < S) {
        rows = (long long)(frames) * (symbols + 1);
      }
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const long long other = __shfl_up_sync(all, rows, step);
      if (lane >= step) rows += other;
    }
    if (n < N) row_splits[n + 1] = before + rows;
    before += __shfl_sync(all, rows, 31);
  }
}

// begins (K+1): of chunks of C rows; sizes (K): their rows.
__global__ void __launch_bounds__(kThreads)
    even_chunks_kernel(const int64_t* __restrict__ total, int64_t C, int32_t K,
                       int32_t* __restrict__ begins, int32_t* __restrict__ sizes) {
  const int32_t k = int32_t(blockIdx.x * kThreads + threadIdx.x);
  if (k > K) return;
  const int64_t begin = min(k * C, *total);
  begins[k] = int32_t(begin);
  if (k < K) sizes[k] = int32_t(min((k + 1) * C, *total) - begin);
}

}  // namespace

void fitting_splits(const Launcher& launch, const View& logit_lengths, const View& target_lengths,
                    int64_t T, int64_t S, const View& row_splits) {
  launch(fitting_splits_kernel, 1, 32, 0, data_of<int32_t>(logit_lengths),
         data_of<int32_t>(target_lengths), int32_t(logit_lengths.size(0)), int32_t(T), int32_t(S),
         mutable_data_of<int64_t>(row_splits));
}

void packed_log_probs(const Launcher& launch, const JoinerInputs& inputs,
                      const LatticeRows& lattice, const JoinerOptions& options,
                      const Tensor& hidden, const RowLogProbs& out) {
  using torch::stable::new_empty;
  const int64_t R = out.px.size(0), C = hidden.size(0), K = (R + C - 1) / C, pitch = hidden.size(1);
  STD_TORCH_CHECK(inputs.am.scalar_type() == ScalarType::BFloat16 &&
                      lattice.row_splits.has_value() && inputs.weight.is_contiguous() &&
                      R <= INT_MAX - C,
                  "packed_log_probs takes packed rows, and contiguous bfloat16");
  const Tensor memory = new_empty(hidden, {2 * K + 1}, ScalarType::Int);
  const View begins(memory.data_ptr(), ScalarType::Int, 1, {K + 1}, {1});
  launch(even_chunks_kernel, uint32_t(K / kThreads + 1), kThreads, 0,
         data_of<int64_t>(*lattice.row_splits) + lattice.row_splits->size(0) - 1, C, int32_t(K),
         mutable_data_of<int32_t>(begins), mutable_data_of<int32_t>(begins) + K + 1);
  Arriving total(launch, view_of<1>(memory, {1}, {1}, K));
  const Tensor layer = weight_and_bias(launch, inputs.weight, inputs.bias);
  const Tensor factor = one_group(view_of<2>(layer, {pitch, inputs.weight.size(0)}, {1, pitch}));
  // Hidden rows need nothing but the beginnings of the chunks.
  const View no_list(nullptr, ScalarType::Int, 1, {0}, {1}), hidden_view(hidden);
  const ActiveLists lists{no_list, begins, begins, begins, begins};
  for (int64_t k = 0; k < K; ++k) {
    if (k > 0 && total.known_to_end_by(k * C)) break;
    active_joiner_rows(launch, inputs.am, inputs.lm, lattice, lists, k, options.activation,
                       hidden_view);
    const Tensor logits = grouped_product(hidden, factor, view_of<1>(memory, {1}, {1}, K + 1 + k));
    const View of_chunk(logits.data_ptr(), ScalarType::BFloat16, 2,
                        {std::min(C, R - k * C), options.vocabulary}, {logits.stride(0), 1});
    log_probs(launch, of_chunk, inputs.targets, lattice, k * C, options.blank, options.mode, out);
  }
}

PRUNED_RNNT_CUDA_OP(fitting_splits)
PRUNED_RNNT_CUDA_OP(packed_log_probs)

}  // namespace pruned_rnnt::cuda
