// active_gradients: the list of active rows, and the gradients of the joiner over one chunk of them
// after the other. Contract: pruned_rnnt/ops/joiner/active_joiner.py, whose loop calls the same
// kernels: from here a launch takes the host a few microseconds.
//
// Axes: N batch, T frames, U symbols, S = U + 1 columns, D joiner dim, V' logits, R rows, C rows of
// a chunk, K chunks, G blocks of its rows, P parts of the rows.
#include <vector>

#include "contracts/joiner.h"
#include "cuda/common/vector_access.cuh"
#include "cuda/whole_lattice/active_ops.cuh"
#include "cuda/whole_lattice/arriving.cuh"
#include "cuda/whole_lattice/grouped_products.cuh"

namespace pruned_rnnt::cuda {
namespace {

using scalar = BFloat16;
using real = acc_type<scalar>;
constexpr int kThreads = 256;
constexpr int kWidth = 16 / sizeof(scalar);
uint32_t blocks_for(int64_t threads) { return uint32_t((threads + kThreads - 1) / kThreads); }

// sums (n): the sum of the G products (G,n) of a chunk, added to what the chunks before it had.
__global__ void __launch_bounds__(kThreads)
    add_products_kernel(const scalar* __restrict__ products, const int32_t* __restrict__ rows,
                        int32_t G, int64_t n, bool add, real* __restrict__ sums) {
  if (add && *rows == 0) return;
  const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (at >= n) return;
  constexpr int ahead = 4;
  real sum[kWidth] = {};
  for (int32_t first = 0; first < G; first += ahead) {
    Vector<scalar, kWidth> value[ahead];
#pragma unroll
    for (int k = 0; k < ahead; ++k) {
      value[k] = Vector<scalar, kWidth>{};
      if (first + k < G) value[k] = load_vector<kWidth>(products + (first + k) * n + at);
    }
#pragma unroll
    for (int k = 0; k < ahead; ++k) {
#pragma unroll
      for (int v = 0; v < kWidth; ++v) sum[v] += static_cast<real>(value[k].x[v]);
    }
  }
  constexpr int part = 16 / sizeof(real);
#pragma unroll
  for (int begin = 0; begin < kWidth; begin += part) {
    Vector<real, part> total{};
    if (add) total = load_vector<part>(static_cast<const real*>(sums + at + begin));
#pragma unroll
    for (int v = 0; v < part; ++v) total.x[v] += sum[begin + v];
    store_vector<part>(sums + at + begin, total);
  }
}

// Rounds n elements, a multiple of kWidth.
__global__ void __launch_bounds__(kThreads)
    round_kernel(const real* __restrict__ x, int64_t n, scalar* __restrict__ out) {
  const int64_t at = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  if (at >= n) return;
  constexpr int part = 16 / sizeof(real);
  Vector<scalar, kWidth> result;
#pragma unroll
  for (int begin = 0; begin < kWidth; begin += part) {
    const Vector<real, part> value = load_vector<part>(x + at + begin);
#pragma unroll
    for (int v = 0; v < part; ++v) result.x[begin + v] = static_cast<scalar>(value.x[v]);
  }
  store_vector<kWidth>(out + at, result);
}

// A gradient of the output layer: `sums` is the gradient itself, or a workspace that is rounded.
struct LayerGradient {
  LayerGradient(const Tensor& like, const OptionalTensor& out) : out_(out) {
    if (!out.has_value()) return;
    sums_ = out->scalar_type() == ScalarType::Float
                ? *out
                : torch::stable::new_empty(like, out->sizes(), ScalarType::Float);
  }
  bool wanted() const { return out_.has_value(); }
  const Tensor& sums() const { return *sums_; }
  void finish(const Launcher& launch) const {
    if (!wanted() || out_->scalar_type() == ScalarType::Float) return;
    STD_TORCH_CHECK(out_->scalar_type() == ScalarType::BFloat16,
                    "active_gradients has gradients in float32 or bfloat16");
    const int64_t n = out_->numel();
    launch(round_kernel, blocks_for(n / kWidth), kThreads, 0, data_of<real>(*sums_), n,
           mutable_data_of<scalar>(*out_));
  }

 private:
  const OptionalTensor& out_;
  OptionalTensor sums_;
};

View numbers(const Tensor& memory, int64_t& used, std::array<int64_t, kMostDims> sizes, int dims) {
  std::array<int64_t, kMostDims> strides{};
  int64_t count = 1;
  for (int i = dims - 1; i >= 0; --i) {
    strides[i] = count;
    count *= sizes[i];
  }
  const View view(mutable_data_of<int32_t>(memory) + used, ScalarType::Int, dims, sizes, strides);
  used += count;
  return view;
}

void zero(const Launcher& launch, const Tensor& x) {
  check(cudaMemsetAsync(x.data_ptr(), 0, size_t(x.numel() * element_bytes(x.scalar_type())),
                        launch.stream()),
        "filling with zeros");
}

}  // namespace

void active_gradients(const Launcher& launch, const View& grad_loss, const JoinerInputs& inputs,
                      const LatticeRows& lattice, const JoinerOptions& options,
                      const RowStatistics& statistics, const View& totals,
                      const ActiveChunks& chunks, double left_out, const JoinerGradients& grads) {
  using torch::stable::new_empty;
  const auto& [am, lm, weight, bias, targets] = inputs;
  const auto& [grad_am, grad_lm, grad_weight, grad_bias] = grads;
  const auto& [chunk_rows, G, P] = chunks;
  const int64_t R = statistics.gx.numel(), N = am.size(0), D = am.size(2), columns = weight.size(0);
  const int64_t K = (R + chunk_rows - 1) / chunk_rows, pitch = D + kBiasColumns;
  STD_TORCH_CHECK(am.scalar_type() == ScalarType::BFloat16 && grad_am.is_contiguous() &&
                      grad_lm.is_contiguous() && weight.is_contiguous() && D % kWidth == 0 &&
                      columns % kWidth == 0 && R <= INT_MAX - kListedRows,
                  "active_gradients takes contiguous bfloat16 of widths that are multiples of 8");

  // --- the list --------------------------------------------------------------------------------
  const int64_t listed_blocks = (R + kListedRows - 1) / kListedRows;
  const Tensor memory = new_empty(
      grad_am, {K * G + 2 * R + 1 + 3 * (K + 1) + listed_blocks * kListedWords}, ScalarType::Int);
  int64_t used = 0;
  // In front, for the alignment of the products' ends.
  const View block_ends = numbers(memory, used, {K, G}, 2);
  const View listed = numbers(memory, used, {R}, 1), places = numbers(memory, used, {R + 1}, 1);
  const View begins = numbers(memory, used, {K + 1}, 1),
             utterances = numbers(memory, used, {K + 1}, 1);
  const ActiveLists lists{listed, places, begins, utterances, numbers(memory, used, {K + 1}, 1)};
  const View found = numbers(memory, used, {listed_blocks, kListedWords}, 2);
  const Tensor limits = new_empty(grad_am, {N, lattice.T + lattice.S}, ScalarType::Float);
  list_active_rows(launch, statistics.gx, statistics.gy, totals, lattice, options.fastemit_lambda,
                   left_out, chunk_rows, View(limits), found, lists, block_ends);
  Arriving total(launch, view_of<1>(memory, {1}, {1}, K * G + 2 * R));

  // --- what the chunks add to ------------------------------------------------------------------
  const Tensor layer = weight_and_bias(launch, weight, bias);
  // One piece of memory, to fill with zeros in one go.
  const int64_t of_lm = N * lm.size(1) * D;
  const Tensor sums = new_empty(grad_am, {of_lm + P * columns}, ScalarType::Float);
  for (const Tensor* x : {&grad_am, &sums}) zero(launch, *x);
  real* const of_rows = mutable_data_of<real>(sums);
  const View lm_sums(of_rows, ScalarType::Float, 3, {N, lm.size(1), D}, {lm.size(1) * D, D, 1});
  const View bias_sums(of_rows + of_lm, ScalarType::Float, 2, {P, columns}, {columns, 1});
  const LayerGradient weight_gradient(grad_am, grad_weight), bias_gradient(grad_am, grad_bias);
  // A chunk ends with the frame in which it becomes full.
  const int64_t C = std::min(chunk_rows + lattice.S, R);
  const Tensor hidden = new_empty(grad_am, {C, pitch});
  const Tensor hidden_columns = view_of<2>(hidden, {C, D}, {pitch, 1});
  const Tensor layer_factor = one_group(view_of<2>(layer, {pitch, columns}, {1, pitch}));
  const Tensor weight_factor = one_group(weight);

  // --- the chunks ------------------------------------------------------------------------------
  const View hidden_view(hidden), grad_am_view(grad_am);
  for (int64_t k = 0; k < K; ++k) {
    if (k > 0 && total.known_to_end_by(k * chunk_rows)) break;
    const Tensor ends = view_of<1>(memory, {G}, {1}, k * G);
    const Tensor size = view_of<1>(memory, {1}, {1}, k * G + G - 1);
    active_joiner_rows(launch, am, lm, lattice, lists, k, options.activation, hidden_view);
    const Tensor logits = grouped_product(hidden, layer_factor, size);
    active_log_probs_backward(launch, grad_loss, statistics, targets, lattice, lists, k,
                              options.vocabulary, options.of_gradient(), View(logits), bias_sums);
    if (weight_gradient.wanted()) {
      const Tensor products = row_block_products(logits, hidden_columns, ends);
      const int64_t n = columns * D;
      launch(add_products_kernel, blocks_for(n / kWidth), kThreads, 0, data_of<scalar>(products),
             data_of<int32_t>(size), int32_t(G), n, k > 0,
             mutable_data_of<real>(weight_gradient.sums()));
    }
    const Tensor grad_hidden = grouped_product(logits, weight_factor, size);
    active_joiner_rows_backward(launch, View(grad_hidden), hidden_view, lattice, lists, k,
                                options.activation, grad_am_view, lm_sums);
  }

  // --- the results -----------------------------------------------------------------------------
  launch(round_kernel, blocks_for(of_lm / kWidth), kThreads, 0, data_of<real>(lm_sums), of_lm,
         mutable_data_of<scalar>(grad_lm));
  weight_gradient.finish(launch);
  if (!bias_gradient.wanted()) return;
  const int64_t parts = std::max<int64_t>(1, P / 32);
  const Tensor partial = new_empty(grad_am, {parts, columns}, ScalarType::Float);
  column_sums(launch, bias_sums, false, View(partial), View(bias_gradient.sums()));
  bias_gradient.finish(launch);
}

PRUNED_RNNT_CUDA_OP(active_gradients)

}  // namespace pruned_rnnt::cuda
