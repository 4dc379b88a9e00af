// The parts of a pruned step that TDT does in other ways. The logits of durations are columns of
// the products that make the joiner's inputs (of the trivial joiner) and the logits (of the
// joiner).
//
// Axes: N batch, T frames, W = U+1 lattice columns, S band, R rows, K durations.
#include "cuda/common/tdt_ops.cuh"
#include "cuda/step/step.cuh"
#include "cuda/step/tdt_kernels.cuh"

namespace pruned_rnnt::cuda {
namespace {

template <typename scalar>
std::array<DurationSide<scalar>, kSides> duration_sides(const PrunedStep& step) {
  std::array<DurationSide<scalar>, kSides> sides;
  for (const int side : {kEncoderSide, kPredictorSide}) {
    const View& x = step.saved.duration_input[side];
    sides[side] = {mutable_data_of<scalar>(x), x.size(1), x.stride(1)};
  }
  return sides;
}

uint32_t blocks_for(int64_t count, int64_t each) {
  return static_cast<uint32_t>((count + each - 1) / each);
}

}  // namespace

void PrunedStep::tdt_simple_lattice(const View& gx, const View& gy, const TdtPart& tdt) const {
  dispatch_floating(s.type, "pruned_step_forward", [&](auto zero) {
    using scalar = decltype(zero);
    const auto sides = duration_sides<scalar>(*this);
    launch(simple_durations_kernel<scalar>,
           dim3(blocks_for(s.T * s.W, kTdtStepThreads), static_cast<uint32_t>(s.N)),
           kTdtStepThreads, 0, sides[kEncoderSide], sides[kPredictorSide],
           static_cast<int32_t>(s.K), mutable_data_of<acc_type<scalar>>(work.durations));
  });
  const auto flat = [](const View& x) { return range_of(x, 0, x.numel()); };
  tdt_recursion(launch, flat(work.px), flat(work.py), work.durations, DurationScores::kLogProbs,
                whole(), s.W - 1, tdt.table, s.sigma, s.delay_penalty, work.lattice_work,
                {part_of(saved.totals, 0), flat(gx), flat(gy), flat(*tdt.stay), flat(*tdt.gd)});
  tdt_window_masses(gx, gy, *tdt.stay);
}

void PrunedStep::tdt_window_masses(const View& gx, const View& gy, const View& stay) const {
  const int64_t frames = s.N * s.T;
  const int32_t T = static_cast<int32_t>(s.T), W = static_cast<int32_t>(s.W);
  const uint32_t blocks = blocks_for(frames, kTdtStepWarps);
  dispatch_accumulator(s.acc, "pruned_step_forward", [&](auto zero) {
    using real = decltype(zero);
    launch(visits_kernel<real>, blocks, kTdtStepThreads, 0, frames, W, data_of<real>(gx),
           data_of<real>(gy), data_of<real>(stay), mutable_data_of<real>(work.visits));
    launch(window_masses_kernel<real>, blocks, kTdtStepThreads, 0, frames, T, W, data_of<real>(gx),
           data_of<real>(gy), data_of<real>(stay), data_of<real>(work.visits),
           mutable_data_of<real>(work.left), mutable_data_of<real>(work.stayed));
  });
}

void PrunedStep::tdt_simple_gradient(const View& gd) const {
  const uint32_t am_blocks = blocks_for(s.T, kTdtStepWarps);
  const dim3 grid(am_blocks + blocks_for(s.W, kGradientColumns), static_cast<uint32_t>(s.N));
  dispatch_floating(s.type, "pruned_step_forward", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    const auto sides = duration_sides<scalar>(*this);
    const auto run = [&](auto kernel) {
      launch(kernel, grid, kTdtStepThreads, 0, sides[kEncoderSide], sides[kPredictorSide],
             static_cast<int32_t>(s.K), static_cast<int32_t>(s.padded_K), am_blocks,
             data_of<real>(part_of(saved.upstream, 0)), data_of<real>(work.durations),
             data_of<real>(gd));
    };
    if (s.K <= 8) return run(simple_durations_backward_kernel<8, scalar>);
    run(simple_durations_backward_kernel<16, scalar>);
  });
}

void PrunedStep::tdt_chunk_durations(int64_t begin, int64_t count) const {
  dispatch_floating(s.type, "pruned_step_forward", [&](auto zero) {
    using scalar = decltype(zero);
    using real = acc_type<scalar>;
    launch(row_durations_kernel<scalar>, blocks_for(count, kTdtStepThreads), kTdtStepThreads, 0,
           data_of<scalar>(work.logits) + s.V, count, s.padded_O, static_cast<int32_t>(s.K),
           mutable_data_of<real>(saved.durations) + begin * s.K);
  });
}

void PrunedStep::tdt_band_lattice(const View& start, const TdtPart& tdt) const {
  tdt_recursion(launch, work.band_px, work.band_py, saved.durations, DurationScores::kLogProbs,
                band(start), s.W - 1, tdt.table, s.sigma, s.delay_penalty, work.band_work,
                {part_of(saved.totals, 1), saved.gx, saved.gy, work.band_stay, saved.gd});
}

// Writes the gradient of a chunk's duration logits into their columns.
void PrunedStep::tdt_chunk_gradient(const View& start, int64_t begin, int64_t count) const {
  const View gradient(data_at(work.logits, s.V), s.type, 2, {count, s.K}, {s.padded_O, 1});
  duration_gradient(launch, part_of(saved.upstream, 1), saved.durations, saved.gd, band(start),
                    begin, s.clamp, gradient);
}

}  // namespace pruned_rnnt::cuda
