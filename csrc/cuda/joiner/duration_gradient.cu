// duration_gradient: gradient of the TDT loss by duration logits, a thread for each row. Formulas:
// pruned_rnnt/ops/joiner/log_probs.py.
//
// Axes: R rows, K durations.
#include "contracts/rows.h"
#include "cuda/common/arithmetic.cuh"
#include "cuda/common/tdt_ops.cuh"
#include "row_geometry.h"

namespace pruned_rnnt::cuda {
namespace {

constexpr int kThreads = 256;

template <typename scalar, typename real>
__global__ void __launch_bounds__(kThreads)
    duration_gradient_kernel(RowGeometry geometry, int64_t row_begin, int64_t rows, int32_t K,
                             const real* __restrict__ grad_loss, const real* __restrict__ logits,
                             const real* __restrict__ occupancies, real clamp, int64_t stride,
                             scalar* __restrict__ gradients) {
  const int64_t r = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (r >= rows) return;
  const int64_t row = row_begin + r;
  const real *logit = logits + row * K, *occupancy = occupancies + row * K;
  scalar* const gradient = gradients + r * stride;
  real mass = 0, largest = minus_infinity<real>();
  for (int32_t n = 0; n < K; ++n) {
    mass += occupancy[n];
    largest = fmax(largest, logit[n]);
  }
  if (mass == 0) {
    for (int32_t n = 0; n < K; ++n) gradient[n] = static_cast<scalar>(0.0f);
    return;
  }
  real sum = 0;
  for (int32_t n = 0; n < K; ++n) sum += exp_of(logit[n] - largest);
  const real upstream = grad_loss[geometry.utterance_of(row)], factor = mass / sum;
  for (int32_t n = 0; n < K; ++n) {
    real unit = factor * exp_of(logit[n] - largest) - occupancy[n];
    if (clamp > 0) unit = unit > clamp ? clamp : (unit < -clamp ? -clamp : unit);
    gradient[n] = static_cast<scalar>(unit * upstream);
  }
}

}  // namespace

void duration_gradient(const Launcher& launch, const View& grad_loss, const View& duration_logits,
                       const View& gd, const LatticeRows& lattice, int64_t row_begin, double clamp,
                       const View& grad) {
  const int64_t rows = grad.size(0);
  if (rows == 0) return;
  const RowGeometry geometry(lattice);
  dispatch_floating(grad.scalar_type(), "duration_gradient", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    launch(duration_gradient_kernel<scalar, real>, uint32_t((rows + kThreads - 1) / kThreads),
           kThreads, 0, geometry, row_begin, rows, int32_t(grad.size(1)), data_of<real>(grad_loss),
           data_of<real>(duration_logits), data_of<real>(gd), static_cast<real>(clamp),
           grad.stride(0), mutable_data_of<scalar>(grad));
  });
}

PRUNED_RNNT_CUDA_OP(duration_gradient)

}  // namespace pruned_rnnt::cuda
