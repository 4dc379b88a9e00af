// duration_gradient: gradient of the TDT loss by duration logits. Formulas:
// pruned_rnnt/ops/joiner/log_probs.py; layout: row_geometry.h.
//
// Axes: R rows, K durations.
#include "contracts/rows.h"
#include "cpu/common/rows.h"
#include "op.h"

namespace pruned_rnnt {
namespace {

template <typename real, typename scalar>
void gradient_row(const real* logits, const real* occupancy, int64_t K, real clamp, real scale,
                  scalar* gradient) {
  real mass = 0;
  for (int64_t k = 0; k < K; ++k) mass += occupancy[k];
  if (mass == 0) {
    std::fill(gradient, gradient + K, scalar(0.0f));
    return;
  }
  const real largest = finite_or_zero(row_maximum<real>(logits, K));
  const real factor = mass / sum_of_exp<real>(logits, K, largest);
  for (int64_t k = 0; k < K; ++k) {
    real unit = factor * exp_of_nonpositive(logits[k] - largest) - occupancy[k];
    if (clamp > 0) unit = std::max(-clamp, std::min(clamp, unit));
    gradient[k] = static_cast<scalar>(unit * scale);
  }
}

void duration_gradient(const View& grad_loss, const View& duration_logits, const View& gd,
                       const LatticeRows& lattice, int64_t row_begin, double clamp,
                       const View& grad) {
  const RowGeometry geometry(lattice);
  const int64_t rows = grad.size(0), K = grad.size(1), stride = grad.stride(0);
  dispatch_floating(grad.scalar_type(), "duration_gradient", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const real* logits = data_of<real>(duration_logits) + row_begin * K;
    const real* occupancy = data_of<real>(gd) + row_begin * K;
    const real* upstream = data_of<real>(grad_loss);
    scalar* gradient = mutable_data_of<scalar>(grad);
    for_rows(geometry, row_begin, rows, K, [&](int64_t r, const RowCursor& node) {
      gradient_row(logits + r * K, occupancy + r * K, K, static_cast<real>(clamp),
                   upstream[node.n()], gradient + r * stride);
    });
  });
}

PRUNED_RNNT_CPU_OP(duration_gradient)

}  // namespace
}  // namespace pruned_rnnt
