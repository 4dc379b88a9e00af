// tdt_lattice: the recursion of token-and-duration transducers over lattices stored as rows. A
// block for each utterance walks over its steps (tdt_walk.cuh); what does not wait for other steps
// is in kernels over the whole grid (tdt_nodes.cuh). Contract:
// pruned_rnnt/ops/lattice/tdt_lattice.py.
//
// Axes: N utterances, T frames, S columns of a frame, U symbols, R rows, K durations.
#include <algorithm>
#include <vector>

#include "contracts/rows.h"
#include "cuda/common/tdt_ops.cuh"
#include "cuda/lattice/tdt_walk.cuh"
#include "workspaces.h"

namespace pruned_rnnt::cuda {
namespace {

template <typename real>
struct TdtArrays {
  const real *px, *py, *duration_logits;
  real *pairs, *rings, *total, *gx, *gy, *stay, *gd;
  int64_t rows, symbols;
  bool normalised;
  real sigma, delay_penalty;
};

// More columns than threads are walked several by a thread, without copies ahead of the walk.
constexpr int kTdtThreads = 512;
// Of the kernels over the whole grid: a warp for each line or frame of a lattice, many for long
// ones.
constexpr int kTdtNodeThreads = 256;
constexpr int64_t kTdtNodeWarps = kTdtNodeThreads / 32, kTdtMostBlocks = 1024;

template <typename real>
__device__ TdtLattice<real> tdt_lattice_of(const RowGeometry& geometry, const DurationTable& table,
                                           const TdtArrays<real>& arrays, int32_t n) {
  const int64_t first = geometry.first_row_of(n);
  const int32_t K = table.count;
  return {arrays.px + first,
          arrays.py + first,
          arrays.duration_logits + first * K,
          geometry.start == nullptr ? nullptr : geometry.start + int64_t(n) * geometry.T,
          reinterpret_cast<Vector<real, 2>*>(arrays.pairs) + first * (K + 3),
          arrays.gx + first,
          arrays.gy + first,
          arrays.stay + first,
          arrays.gd + first * K,
          geometry.frames_of(n),
          geometry.target_lengths[n],
          geometry.width_of(n),
          K,
          table.lag(),
          arrays.normalised,
          arrays.sigma,
          arrays.delay_penalty};
}

// The weights of all nodes, or their shares in the place of the weights. blockIdx.y is n.
template <typename real, int most, bool has_betas>
__global__ void __launch_bounds__(kTdtNodeThreads)
    tdt_nodes_kernel(RowGeometry geometry, DurationTable table, TdtArrays<real> arrays) {
  const TdtLattice<real> lattice = tdt_lattice_of(geometry, table, arrays, blockIdx.y);
  const int32_t step = gridDim.x * kTdtNodeWarps;
  for (int32_t line = blockIdx.x * kTdtNodeWarps + threadIdx.x / 32; line < lattice.frames;
       line += step) {
    for (int32_t column = threadIdx.x % 32; column < lattice.width; column += 32) {
      const TdtNode node = lattice.node_at(line, column);
      if (node.u < 0 || node.u > lattice.symbols) continue;
      auto* const pairs = lattice.pairs_of(node.t, node.u, line);
      if constexpr (has_betas) {
        write_shares<real, most>(lattice, table, node, pairs);
      } else {
        write_weights<real, most>(lattice, node, pairs);
      }
    }
  }
}

// The occupancies of all rows; 0 for rows that are no nodes, and for all if there is no path.
template <typename real>
__global__ void __launch_bounds__(kTdtNodeThreads)
    tdt_occupancies_kernel(RowGeometry geometry, DurationTable table, TdtArrays<real> arrays) {
  const int32_t n = blockIdx.y;
  const TdtLattice<real> lattice = tdt_lattice_of(geometry, table, arrays, n);
  const bool has_path = arrays.total[n] != minus_infinity<real>();
  int64_t rows = geometry.utterance_rows;
  if (geometry.row_splits != nullptr) {
    rows = min(arrays.rows, geometry.row_splits[n + 1]) - geometry.row_splits[n];
  }
  const int64_t frames = (rows + lattice.width - 1) / lattice.width;
  for (int64_t t = blockIdx.x * kTdtNodeWarps + threadIdx.x / 32; t < frames;
       t += gridDim.x * kTdtNodeWarps) {
    const bool has_nodes = has_path && t < lattice.frames;
    const int32_t start = has_nodes && lattice.start != nullptr ? lattice.start[t] : 0;
    for (int32_t j = threadIdx.x % 32; j < lattice.width; j += 32) {
      const int64_t row = t * lattice.width + j;
      if (row >= rows) continue;
      const int32_t u = start + j, frame = static_cast<int32_t>(t);
      const bool is_node = has_nodes && u >= 0 && u <= lattice.symbols;
      write_occupancies(lattice, table,
                        is_node ? lattice.pairs_of(frame, u, lattice.line_of(frame, u)) : nullptr,
                        row);
    }
  }
}

// beta of all nodes and log P, or the masses of all nodes. Shared memory: the ring, if ring_bytes
// is not 0 (else it is in global memory, and is_ahead is false), and inputs.
template <typename real, int most, bool is_ahead, bool has_betas>
__global__ void __launch_bounds__(kTdtThreads)
    tdt_walk_kernel(RowGeometry geometry, DurationTable table, TdtArrays<real> arrays,
                    int64_t ring_numbers, int32_t ring_bytes) {
  const int32_t n = blockIdx.x;
  const TdtLattice<real> lattice = tdt_lattice_of(geometry, table, arrays, n);
  unsigned char* const shared = dynamic_shared_memory<unsigned char>();
  void* ring = shared;
  if (!is_ahead && ring_bytes == 0) ring = arrays.rings + n * ring_numbers;
  TdtWalk<real, most, is_ahead> walk(lattice, table, ring, int32_t(arrays.symbols) + 1,
                                     reinterpret_cast<Vector<real, 2>*>(shared + ring_bytes));
  if constexpr (has_betas) {
    if (arrays.total[n] != minus_infinity<real>()) walk.masses();
  } else {
    const double log_p = lattice.frames > 0 ? walk.sums() : minus_infinity<double>();
    if (threadIdx.x == 0) arrays.total[n] = static_cast<real>(log_p);
  }
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
  const int64_t input_bytes = kTdtAhead * tdt_inputs(most) * threads * 2 * sizeof(real);
  const bool is_ahead = columns <= threads && ring_bytes > 0 && ring_bytes + input_bytes <= limit;
  const auto walk = [&](auto kernel) {
    launch(kernel, geometry.N, uint32_t(threads), ring_bytes + (is_ahead ? input_bytes : 0),
           geometry, table, arrays, 4 * slots, int32_t(ring_bytes));
  };
  const int64_t blocks = (int64_t(geometry.T) + kTdtNodeWarps - 1) / kTdtNodeWarps;
  const dim3 grid(uint32_t(std::clamp<int64_t>(blocks, 1, kTdtMostBlocks)), uint32_t(geometry.N));
  const auto visit_all = [&](auto kernel) {
    launch(kernel, grid, kTdtNodeThreads, 0, geometry, table, arrays);
  };
  visit_all(tdt_nodes_kernel<real, most, false>);
  walk(is_ahead ? tdt_walk_kernel<real, most, true, false>
                : tdt_walk_kernel<real, most, false, false>);
  visit_all(tdt_nodes_kernel<real, most, true>);
  walk(is_ahead ? tdt_walk_kernel<real, most, true, true>
                : tdt_walk_kernel<real, most, false, true>);
  visit_all(tdt_occupancies_kernel<real>);
}

// Enough for the usual table, 0 to 4, which then needs fewer registers.
constexpr int kUsualDurations = 5;

}  // namespace

void tdt_recursion(const Launcher& launch, const View& px, const View& py, const View& durations,
                   DurationScores scores, const LatticeRows& lattice, int64_t symbols,
                   const std::vector<int64_t>& table_of, double sigma, double delay_penalty,
                   const View& work, const TdtSums& sums) {
  const RowGeometry geometry(lattice, symbols);
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
  // Blanks of several durations have symbols of duration 0 alone, the first.
  table.symbol_count = scores == DurationScores::kBlanks ? 1 : table.count;
  dispatch_accumulator(px.scalar_type(), "tdt_lattice", [&](auto zero) {
    using real = decltype(zero);
    real* const pairs = mutable_data_of<real>(work);
    const TdtArrays<real> arrays{data_of<real>(px),
                                 data_of<real>(py),
                                 data_of<real>(durations),
                                 pairs,
                                 pairs + 2 * (table.count + 3) * px.numel(),
                                 mutable_data_of<real>(sums.total),
                                 mutable_data_of<real>(sums.gx),
                                 mutable_data_of<real>(sums.gy),
                                 mutable_data_of<real>(sums.stay),
                                 mutable_data_of<real>(sums.gd),
                                 px.numel(),
                                 symbols,
                                 scores != DurationScores::kLogits,
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
                 const View& duration_logits, const LatticeRows& lattice, const TdtOptions& options,
                 int64_t symbols, const View& work, const TdtSums& sums) {
  const auto scores = options.multi_blank ? DurationScores::kBlanks : DurationScores::kLogits;
  tdt_recursion(launch, px, py, duration_logits, scores, lattice, symbols, options.durations,
                options.sigma, options.delay_penalty, work, sums);
}

PRUNED_RNNT_CUDA_OP(tdt_lattice)

}  // namespace pruned_rnnt::cuda
