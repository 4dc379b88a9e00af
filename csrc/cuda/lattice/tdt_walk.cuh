// The recursion of token-and-duration transducers over one utterance, by one block (formulas:
// pruned_rnnt/ops/lattice/tdt_lattice.py). A thread takes a column of the lattice. With a duration
// of 0 in the table the threads step along anti-diagonals, else along frames:
//
//   u 2   2  1  0     beta, backwards: a number is the step that computes the node. Each step needs
//     1   3  2  1     nodes of earlier steps alone, of the thread's own column (blanks) and of the
//     0   4  3  2     next one (symbols).
//         0  1  2 t
//
// Values of the last frames are in a ring, a slot for each frame and column. A symbol's target and
// its source are a frame apart when both are walked, so that a ring of (longest duration + 2)
// frames is never read and overwritten in the same step. Masses are pushed along the arcs: blanks
// and symbols into slots of their own, each with one writer, so that sums have a fixed order.
//
// Axes: T frames, U symbols, K durations.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/common/vector_access.cuh"
#include "cuda/lattice/tdt_sums.cuh"
#include "row_geometry.h"

namespace pruned_rnnt::cuda {

constexpr int kMostDurations = 16;

struct DurationTable {
  int32_t count, longest;
  bool has_zero;
  int32_t of[kMostDurations];

  // Frames of the ring.
  __host__ __device__ int32_t ring_frames() const { return longest + 2; }
};

// One utterance. shares: of the symbol and the blank of each duration, as pairs.
template <typename real>
struct TdtLattice {
  const real *px, *py, *duration_logits;  // of its first row
  const int32_t* start;                   // of its first frame; null: 0
  real *shares, *gx, *gy, *stay, *gd;
  int32_t frames, symbols, width;
  bool normalised;  // duration logits are log-probabilities
  real sigma, delay_penalty;

  // -1 outside the band.
  RNNT_DEVICE int64_t row(int32_t t, int32_t u) const {
    const int32_t column = start == nullptr ? u : u - start[t];
    return column >= 0 && column < width ? int64_t(t) * width + column : -1;
  }
  // Added to px at frame t.
  RNNT_DEVICE real symbol_offset(int32_t t) const {
    const real middle = static_cast<real>(frames - 1) / 2;
    return delay_penalty * (middle - static_cast<real>(t)) - sigma;
  }
};

// Frames of each thread's inputs in shared memory, ahead of the walk.
constexpr int kTdtAhead = 8;

template <typename real, int most, bool is_ahead>
class TdtWalk {
  using Number = Probability<real>;
  using Pair = Vector<real, 2>;

 public:
  // ring: 2 doubles for each of ring_frames() * (columns + 1) slots. inputs: kTdtAhead * 2 K
  // numbers for each thread, if is_ahead; then the block has a thread for each column.
  RNNT_DEVICE TdtWalk(const TdtLattice<real>& lattice, const DurationTable& table, void* ring,
                      int32_t columns, real* inputs)
      : lattice_(lattice),
        table_(table),
        betas_(static_cast<Number*>(ring)),
        blanks_(static_cast<double*>(ring)),
        symbols_(blanks_ + int64_t(table.ring_frames()) * (columns + 1)),
        columns_(columns),
        lag_(table.has_zero ? 1 : 0),
        inputs_(inputs) {}

  // Writes the arcs' shares of all nodes and returns log P.
  __device__ double sums() {
    __shared__ double log_p;
    if (threadIdx.x == 0) log_p = minus_infinity<double>();
    const int32_t T = lattice_.frames, U = lattice_.symbols;
    const auto request = [&](int32_t f) {
      const int64_t row = f < T ? lattice_.row(T - 1 - f, threadIdx.x) : -1;
      if (row < 0) return;
      real* const slot = slot_of(f);
      copy_async(slot, lattice_.px + row);
      copy_async(slot + blockDim.x, lattice_.py + row);
      for (int n = 0; n < table_.count; ++n) {
        copy_async(slot + (2 + n) * blockDim.x, lattice_.duration_logits + row * table_.count + n);
      }
    };
    begin(request);
    for (int32_t k = 0; k < T + lag_ * U; ++k) {
      for (int32_t u = threadIdx.x; u <= U; u += blockDim.x) {
        const int32_t f = k - lag_ * (U - u), t = T - 1 - f;
        if (f < 0 || t < 0) continue;
        const int64_t row = lattice_.row(t, u);
        if (is_ahead) wait_copies<kTdtAhead - 2>();
        const Number beta = row < 0 ? Number::zero() : sum_node(f, t, u, row);
        if (is_ahead) ahead(request, f);
        betas_[slot(t % table_.ring_frames(), u)] = beta;
        if (t == 0 && u == 0) log_p = beta.exact_log();
      }
      __syncthreads();
    }
    finish();
    return log_p;
  }

  // Writes the occupancies of the utterance's nodes; log P must not be -inf.
  __device__ void masses() {
    const int32_t T = lattice_.frames, U = lattice_.symbols, K = table_.count;
    const int64_t slots = int64_t(table_.ring_frames()) * (columns_ + 1);
    for (int64_t i = threadIdx.x; i < 2 * slots; i += blockDim.x) blanks_[i] = 0;
    __syncthreads();
    if (threadIdx.x == 0) blanks_[0] = 1;
    const auto request = [&](int32_t t) {
      const int64_t row = t < T ? lattice_.row(t, threadIdx.x) : -1;
      if (row < 0) return;
      Pair* const slot = pair_slot_of(t);
      for (int n = 0; n < K; ++n) {
        copy_async(slot + n * blockDim.x, pairs_of(row) + n);
      }
    };
    begin(request);
    for (int32_t k = 0; k < T + lag_ * U; ++k) {
      for (int32_t u = threadIdx.x; u <= U; u += blockDim.x) {
        const int32_t t = k - lag_ * u;
        if (t < 0 || t >= T) continue;
        const int64_t row = lattice_.row(t, u);
        if (is_ahead) wait_copies<kTdtAhead - 2>();
        if (row >= 0) push_node(t, u, row);
        if (is_ahead) ahead(request, t);
      }
      __syncthreads();
    }
    finish();
  }

 private:
  RNNT_DEVICE int64_t slot(int32_t frame, int32_t u) const {
    return int64_t(frame) * (columns_ + 1) + u;
  }
  // The slot of the frame `duration` behind that of slot frame.
  RNNT_DEVICE int32_t later(int32_t frame, int32_t duration) const {
    const int32_t sum = frame + duration;
    return sum >= table_.ring_frames() ? sum - table_.ring_frames() : sum;
  }

  // Number i of the inputs of a frame is i * blockDim.x behind.
  RNNT_DEVICE real* slot_of(int32_t f) const {
    return inputs_ + f % kTdtAhead * (2 * most * blockDim.x) + threadIdx.x;
  }
  template <typename Request>
  RNNT_DEVICE void begin(Request&& request) const {
    if (is_ahead && int32_t(threadIdx.x) <= lattice_.symbols) {
      for (int32_t f = 0; f < kTdtAhead - 1; ++f) {
        request(f);
        commit_copies();
      }
    }
    __syncthreads();
  }
  // Frame f has been read.
  template <typename Request>
  RNNT_DEVICE void ahead(Request&& request, int32_t f) const {
    request(f + kTdtAhead - 1);
    commit_copies();
  }
  RNNT_DEVICE void finish() const {
    if (is_ahead) wait_copies<0>();
    __syncthreads();
  }

  RNNT_DEVICE Pair* pair_slot_of(int32_t f) const {
    return reinterpret_cast<Pair*>(inputs_) + f % kTdtAhead * (most * blockDim.x) + threadIdx.x;
  }
  RNNT_DEVICE Pair* pairs_of(int64_t row) const {
    return reinterpret_cast<Pair*>(lattice_.shares) + row * table_.count;
  }

  // Log-probabilities of the durations from their logits.
  RNNT_DEVICE void normalise(real (&logits)[most]) const {
    real largest = minus_infinity<real>(), sum = 0;
#pragma unroll
    for (int n = 0; n < most; ++n) largest = fmax(largest, logits[n]);
    const bool none = largest == minus_infinity<real>();
#pragma unroll
    for (int n = 0; n < most; ++n) sum += exp_of(logits[n] - (none ? real(0) : largest));
    const real normaliser = none ? real(0) : largest + log_of(sum);
#pragma unroll
    for (int n = 0; n < most; ++n) logits[n] -= normaliser;
  }

  RNNT_DEVICE Number sum_node(int32_t f, int32_t t, int32_t u, int64_t row) {
    const int32_t T = lattice_.frames, U = lattice_.symbols, K = table_.count;
    const real* const inputs = is_ahead ? slot_of(f) : nullptr;
    const real px = is_ahead ? inputs[0] : lattice_.px[row];
    const real py = is_ahead ? inputs[blockDim.x] : lattice_.py[row];
    real logits[most];
#pragma unroll
    for (int n = 0; n < most; ++n) {
      logits[n] = minus_infinity<real>();
      if (n >= K) continue;
      logits[n] = is_ahead ? inputs[(2 + n) * blockDim.x] : lattice_.duration_logits[row * K + n];
    }
    if (!lattice_.normalised) normalise(logits);
    const Number symbol = Number::exp(to_log_zero(px + lattice_.symbol_offset(t)));
    const Number blank = Number::exp(to_log_zero(py - lattice_.sigma));
    const int32_t here = t % table_.ring_frames();
    Number arrive[2 * most];
#pragma unroll
    for (int n = 0; n < most; ++n) {
      arrive[2 * n] = arrive[2 * n + 1] = Number::zero();
      if (n >= K) continue;
      const int32_t duration = table_.of[n], target = t + duration;
      const int32_t there = later(here, duration);
      // Both slots exist, whatever is in them.
      const Number above = betas_[slot(there, u + 1)], beside = betas_[slot(there, u)];
      const bool ends = target == T && u == U;
      const Number chosen = Number::exp(to_log_zero(logits[n]));
      const Number symbol_and_end = symbol * chosen * above, to_end = blank * chosen;
      const Number blank_and_end = to_end * beside;
      if (target < T && u < U) arrive[2 * n] = symbol_and_end;
      if (target < T && duration > 0) arrive[2 * n + 1] = blank_and_end;
      if (ends) arrive[2 * n + 1] = to_end;
    }
    real shares[2 * most];
    Number total = sum_with_shares(arrive, shares);
    Pair* const stored = pairs_of(row);
#pragma unroll
    for (int n = 0; n < most; ++n) {
      if (n < K) store_vector<2>(stored[n].x, Pair{{shares[2 * n], shares[2 * n + 1]}});
    }
    total.normalise();
    return total;
  }

  RNNT_DEVICE void push_node(int32_t t, int32_t u, int64_t row) {
    const int32_t T = lattice_.frames, K = table_.count;
    const int32_t here = t % table_.ring_frames();
    double &by_blank = blanks_[slot(here, u)], &by_symbol = symbols_[slot(here, u)];
    const double mass = by_blank + by_symbol;
    // All targets are read before the first is written: they differ, so that nothing waits for a
    // sum but those that follow it.
    double to_symbol[most], to_blank[most];
    Pair shares[most];
    double sum = 0;
#pragma unroll
    for (int n = 0; n < most; ++n) {
      if (n >= K) break;
      const int32_t there = later(here, table_.of[n]);
      to_symbol[n] = symbols_[slot(there, u + 1)];
      to_blank[n] = blanks_[slot(there, u)];
      shares[n] =
          load_vector<2>((is_ahead ? pair_slot_of(t) + n * blockDim.x : pairs_of(row) + n)->x);
      sum += static_cast<double>(shares[n].x[0]) + static_cast<double>(shares[n].x[1]);
    }
    by_blank = by_symbol = 0;
    const double each = sum == 0 ? 0 : mass / sum;
    double symbols = 0, blanks = 0, stay = 0;
#pragma unroll
    for (int n = 0; n < most; ++n) {
      if (n >= K) break;
      const double symbol = each * static_cast<double>(shares[n].x[0]);
      const double blank = each * static_cast<double>(shares[n].x[1]);
      symbols += symbol;
      blanks += blank;
      lattice_.gd[row * K + n] = static_cast<real>(symbol + blank);
      const int32_t duration = table_.of[n];
      if (duration == 0) stay = symbol;
      if (t + duration >= T) continue;
      const int32_t there = later(here, duration);
      if (u < lattice_.symbols) symbols_[slot(there, u + 1)] = to_symbol[n] + symbol;
      if (duration > 0) blanks_[slot(there, u)] = to_blank[n] + blank;
    }
    lattice_.gx[row] = static_cast<real>(symbols);
    lattice_.gy[row] = static_cast<real>(blanks);
    lattice_.stay[row] = static_cast<real>(stay);
  }

  const TdtLattice<real>& lattice_;
  const DurationTable& table_;
  // The ring, of beta and then of masses: what blanks and symbols bring to a node.
  Number* const betas_;
  double *const blanks_, *const symbols_;
  const int32_t columns_, lag_;
  real* const inputs_;
};

}  // namespace pruned_rnnt::cuda
