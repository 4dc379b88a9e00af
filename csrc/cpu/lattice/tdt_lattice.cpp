// tdt_lattice: the recursion of token-and-duration transducers. The recursion and its boundary
// cases are stated in pruned_rnnt/ops/lattice/tdt_lattice.py; layout in row_geometry.h.
//
// Axes: N utterances, T frames, U symbols, K durations.
#include "contracts/rows.h"
#include "cpu/common/parallel.h"
#include "cpu/common/vectorise.h"
#include "cpu/lattice/tdt_recursion.h"
#include "op.h"

namespace pruned_rnnt {
namespace {

// Scratch memory of a thread.
struct TdtScratch {
  std::vector<double> ring, frames;
};

// Both walks over one utterance; returns log P. Writes every element of its frames.
template <typename real>
double run_utterance(const TdtUtterance<real>& lattice, TdtScratch& scratch) {
  const int64_t K = lattice.count();
  double total = minus_infinity<double>;
  if (lattice.frames > 0) {
    const int64_t longest = *std::max_element(lattice.durations.begin(), lattice.durations.end());
    scratch.frames.resize((2 * K + 3) * lattice.width);
    const FrameRing betas(scratch.ring, longest + 1, lattice.symbols, minus_infinity<double>);
    total = run_vectorised<TdtBackward>(&lattice, &betas, scratch.frames.data());
    if (total != minus_infinity<double>) {
      const FrameRing masses(scratch.ring, longest + 1, lattice.symbols, 0.0);
      run_vectorised<TdtForward>(&lattice, &masses, scratch.frames.data());
    }
  }
  const bool has_path = total != minus_infinity<double>;
  const int64_t end = lattice.geometry.stored_frames_of(lattice.n) * lattice.width;
  const int64_t empty = has_path ? lattice.frames * lattice.width : 0;
  for (real* rows : {lattice.gx, lattice.gy, lattice.stay}) {
    std::fill(rows + empty, rows + std::max(end, empty), real(0));
  }
  std::fill(lattice.gd + empty * K, lattice.gd + std::max(end, empty) * K, real(0));
  return total;
}

void tdt_lattice(const View& px, const View& py, const View& duration_logits,
                 const LatticeRows& lattice, const TdtOptions& options, int64_t symbols,
                 const View& work, const TdtSums& sums) {
  const RowGeometry geometry(lattice, symbols);
  const int64_t K = static_cast<int64_t>(options.durations.size());
  dispatch_accumulator(px.scalar_type(), "tdt_lattice", [&](auto zero) {
    using real = decltype(zero);
    parallel_tasks(geometry.N, 1, [&](int64_t begin, int64_t end) {
      TdtScratch scratch;
      for (int64_t n = begin; n < end; ++n) {
        const int64_t first = geometry.first_row_of(n);
        const TdtUtterance<real> utterance{geometry,
                                           options.durations,
                                           data_of<real>(px) + first,
                                           data_of<real>(py) + first,
                                           data_of<real>(duration_logits) + first * K,
                                           mutable_data_of<real>(work) + first * 2 * K,
                                           mutable_data_of<real>(sums.gx) + first,
                                           mutable_data_of<real>(sums.gy) + first,
                                           mutable_data_of<real>(sums.stay) + first,
                                           mutable_data_of<real>(sums.gd) + first * K,
                                           n,
                                           geometry.frames_of(n),
                                           geometry.target_lengths[n],
                                           geometry.width_of(n),
                                           options.sigma,
                                           options.delay_penalty,
                                           options.multi_blank};
        mutable_data_of<real>(sums.total)[n] = static_cast<real>(run_utterance(utterance, scratch));
      }
    });
  });
}

PRUNED_RNNT_CPU_OP(tdt_lattice)

}  // namespace
}  // namespace pruned_rnnt
