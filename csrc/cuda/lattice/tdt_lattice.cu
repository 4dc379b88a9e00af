// tdt_lattice: the recursion of token-and-duration transducers over lattices stored as rows, one
// block for each utterance (tdt_walk.cuh). Contract: pruned_rnnt/ops/lattice/tdt_lattice.py.
//
// Axes: N utterances, T frames, S columns of a frame, U symbols, R rows, K durations.
#include <algorithm>
#include <vector>

#include "cuda/common/tdt_ops.cuh"
#include "cuda/lattice/tdt_elements.h"
#include "cuda/lattice/tdt_walk.cuh"

namespace pruned_rnnt::cuda {
namespace {

template <typename real>
struct TdtArrays {
  const real *px, *py, *duration_logits;
  real *shares, *rings, *total, *gx, *gy, *stay, *gd;
  int64_t rows, symbols;
  bool normalised;
  real sigma, delay_penalty;
};

// More columns than threads are walked several by a thread, without copies ahead of the walk.
constexpr int kTdtThreads = 512;

template <typename real>
__device__ TdtLattice<real> tdt_lattice_of(const RowGeometry& geometry,
                                           const TdtArrays<real>& arrays, int32_t K, int32_t n) {
  const int64_t first = geometry.first_row_of(n);
  return {arrays.px + first,
          arrays.py + first,
          arrays.duration_logits + first * K,
          geometry.start == nullptr ? nullptr : geometry.start + int64_t(n) * geometry.T,
          arrays.shares + first * 2 * K,
          arrays.gx + first,
          arrays.gy + first,
          arrays.stay + first,
          arrays.gd + first * K,
          geometry.frames_of(n),
          geometry.target_lengths[n],
          geometry.width_of(n),
          arrays.normalised,
          arrays.sigma,
          arrays.delay_penalty};
}

// Clears the occupancies that the walk does not write: rows that are no nodes, and all if there is
// no path. By all threads, a warp for each frame.
template <typename real>
__device__ void clear_others(const TdtLattice<real>& lattice, int32_t K, int64_t rows,
                             bool has_path) {
  const int64_t frames = (rows + lattice.width - 1) / lattice.width;
  for (int64_t t = threadIdx.x / 32; t < frames; t += blockDim.x / 32) {
    const bool has_nodes = has_path && t < lattice.frames;
    const int32_t start = has_nodes && lattice.start != nullptr ? lattice.start[t] : 0;
    for (int32_t j = threadIdx.x % 32; j < lattice.width; j += 32) {
      const int64_t row = t * lattice.width + j;
      const int32_t u = start + j;
      if (row >= rows || (has_nodes && u >= 0 && u <= lattice.symbols)) continue;
      lattice.gx[row] = lattice.gy[row] = lattice.stay[row] = 0;
      for (int32_t n = 0; n < K; ++n) lattice.gd[row * K + n] = 0;
    }
  }
}

// Shared memory: the ring, if ring_bytes is not 0 (else it is in global memory), and inputs.
template <typename real, int most, bool is_ahead>
__global__ void __launch_bounds__(kTdtThreads)
    tdt_lattice_kernel(RowGeometry geometry, DurationTable table, TdtArrays<real> arrays,
                       int64_t ring_numbers, int32_t ring_bytes) {
  const int32_t n = blockIdx.x;
  const TdtLattice<real> lattice = tdt_lattice_of(geometry, arrays, table.count, n);
  unsigned char* const shared = dynamic_shared_memory<unsigned char>();
  void* ring = shared;
  if (ring_bytes == 0) ring = arrays.rings + n * ring_numbers;
  double log_p = minus_infinity<double>();
  if (lattice.frames > 0) {
    TdtWalk<real, most, is_ahead> walk(lattice, table, ring, int32_t(arrays.symbols) + 1,
                                       reinterpret_cast<real*>(shared + ring_bytes));
    log_p = walk.sums();
    if (log_p != minus_infinity<double>()) walk.masses();
  }
  if (threadIdx.x == 0) arrays.total[n] = static_cast<real>(log_p);
  int64_t rows = geometry.utterance_rows;
  if (geometry.row_splits != nullptr) {
    rows = min(arrays.rows, geometry.row_splits[n + 1]) - geometry.row_splits[n];
  }
  clear_others(lattice, table.count, rows, log_p != minus_infinity<double>());
}

template <typename real, int most>
void run(const Launcher& launch, const RowGeometry& geometry, const DurationTable& table,
         const TdtArrays<real>& arrays) {
  const int64_t columns = arrays.symbols + 1;
  const int64_t threads = std::min<int64_t>((columns + 31) / 32 * 32, kTdtThreads);
  const int64_t limit = launch.shared_bytes() - 1024;
  // 4 numbers of either type for a slot in global memory, as tdt_workspace allocates them.
  const int64_t slots = table.ring_frames() * (columns + 1);
  int64_t ring_bytes = 2 * sizeof(double) * slots;
  if (ring_bytes > limit) ring_bytes = 0;
  const int64_t input_bytes = kTdtAhead * 2 * most * threads * sizeof(real);
  const bool is_ahead = columns <= threads && ring_bytes + input_bytes <= limit;
  const auto kernel =
      is_ahead ? tdt_lattice_kernel<real, most, true> : tdt_lattice_kernel<real, most, false>;
  launch(kernel, geometry.N, uint32_t(threads), ring_bytes + (is_ahead ? input_bytes : 0), geometry,
         table, arrays, 4 * slots, int32_t(ring_bytes));
}

// Enough for the usual table, 0 to 4, which then needs fewer registers.
constexpr int kUsualDurations = 5;

}  // namespace

void tdt_recursion(const Launcher& launch, const View& px, const View& py, const View& durations,
                   bool has_log_probs, const TdtRowsOf& rows, const std::vector<int64_t>& table_of,
                   double sigma, double delay_penalty, const View& work, const TdtSumsOf& sums) {
  const RowGeometry geometry(rows.logit_lengths, rows.target_lengths, rows.start, rows.row_splits,
                             rows.T, rows.S, rows.symbols);
  if (geometry.N == 0) return;
  DurationTable table{};
  table.count = int32_t(table_of.size());
  STD_TORCH_CHECK(table.count <= kMostDurations, "tdt_lattice takes at most ", kMostDurations,
                  " durations");
  for (int32_t n = 0; n < table.count; ++n) {
    table.of[n] = int32_t(table_of[n]);
    table.longest = std::max(table.longest, table.of[n]);
    table.has_zero |= table.of[n] == 0;
  }
  STD_TORCH_CHECK(work.numel() >= tdt_elements(px.numel(), geometry.N, rows.symbols, table.count,
                                               table.longest),
                  "tdt_lattice: work has ", work.numel(), " elements, which are too few");
  dispatch_accumulator(px.scalar_type(), "tdt_lattice", [&](auto zero) {
    using real = decltype(zero);
    real* const shares = mutable_data_of<real>(work);
    const TdtArrays<real> arrays{data_of<real>(px),
                                 data_of<real>(py),
                                 data_of<real>(durations),
                                 shares,
                                 shares + 2 * table.count * px.numel(),
                                 mutable_data_of<real>(sums.total),
                                 mutable_data_of<real>(sums.gx),
                                 mutable_data_of<real>(sums.gy),
                                 mutable_data_of<real>(sums.stay),
                                 mutable_data_of<real>(sums.gd),
                                 px.numel(),
                                 rows.symbols,
                                 has_log_probs,
                                 static_cast<real>(sigma),
                                 static_cast<real>(delay_penalty)};
    if (table.count <= kUsualDurations) {
      run<real, kUsualDurations>(launch, geometry, table, arrays);
    } else {
      run<real, kMostDurations>(launch, geometry, table, arrays);
    }
  });
}

void tdt_lattice(const Launcher& launch, const View& px, const View& py,
                 const View& duration_logits, const View& logit_lengths, const View& target_lengths,
                 const OptionalView& start, const OptionalView& row_splits, int64_t T, int64_t S,
                 std::vector<int64_t> durations, double sigma, double delay_penalty,
                 int64_t symbols, const View& work, const View& total, const View& gx,
                 const View& gy, const View& stay, const View& gd) {
  const TdtRowsOf rows{logit_lengths, target_lengths, start, row_splits, T, S, symbols};
  tdt_recursion(launch, px, py, duration_logits, false, rows, durations, sigma, delay_penalty, work,
                {total, gx, gy, stay, gd});
}

PRUNED_RNNT_CUDA_OP(tdt_lattice)

}  // namespace pruned_rnnt::cuda
