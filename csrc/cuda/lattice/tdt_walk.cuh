// The recursion of token-and-duration transducers over one utterance, by one block (formulas:
// pruned_rnnt/ops/lattice/tdt_lattice.py). A thread takes a column of the lattice. With a duration
// of 0 in the table the threads step along anti-diagonals, else along frames:
//
//   u 2   2  1  0     beta, backwards: a number is the step that computes the node. Each step needs
//     1   3  2  1     nodes of earlier steps alone, of the thread's own column (blanks) and of the
//     0   4  3  2     next one (symbols).
//         0  1  2 t
//
// The steps wait for each other, so they do only what needs the values of earlier steps: the rest
// is in tdt_nodes.cuh. Values of the last steps are in a ring, a slot for each step and column. A
// symbol's target and its source are (longest duration + 1) steps apart at most, so that a ring of
// one step more is never read and overwritten in the same step. Masses are pushed along the arcs:
// blanks and symbols into slots of their own, each with one writer, so that sums have a fixed
// order.
//
// Axes: T frames, U symbols, K durations.
#pragma once

#include "cuda/common/async_copy.cuh"
#include "cuda/lattice/tdt_nodes.cuh"

namespace pruned_rnnt::cuda {

// Steps of each thread's inputs in shared memory, ahead of the walk, and pairs of each at most.
constexpr int kTdtAhead = 6;
constexpr int tdt_inputs(int durations) { return durations + 2; }

template <typename real, int most, bool is_ahead>
class TdtWalk {
  using Number = Probability<real>;
  using Pair = Vector<real, 2>;

 public:
  // ring: 2 doubles for each of ring_frames() * (columns + 1) slots. inputs: kTdtAhead *
  // tdt_inputs(most) pairs for each thread, if is_ahead; then the block has a thread for each
  // column.
  RNNT_DEVICE TdtWalk(const TdtLattice<real>& lattice, const DurationTable& table, void* ring,
                      int32_t columns, Pair* inputs)
      : lattice_(lattice),
        table_(table),
        betas_(static_cast<Pair*>(ring)),
        blanks_(static_cast<double*>(ring)),
        symbols_(blanks_ + int64_t(table.ring_frames()) * (columns + 1)),
        columns_(columns),
        inputs_(inputs) {}

  // Writes beta of all nodes from the weights and returns log P.
  __device__ double sums() {
    __shared__ double log_p;
    if (threadIdx.x == 0) log_p = minus_infinity<double>();
    const int32_t K = table_.count, R = table_.ring_frames();
    int32_t here = last_step() % R;
    walk<-1>(
        K + 2,
        [&](TdtNode node, Pair* pairs, const Pair* inputs) {
          Number beta = Number::zero();
          if (pairs != nullptr) beta = sum_node(node, here, inputs);
          Pair saved{};
          beta.save(&saved.x[0], &saved.x[1]);
          store_vector<2>(betas_[slot(here, node.u)].x, saved);
          if (pairs != nullptr) {
            store_vector<2>(pairs[int64_t(K + 2) * lattice_.width].x, saved);
          }
          if (node.t == 0 && node.u == 0) log_p = beta.exact_log();
        },
        [&] { here = here == 0 ? R - 1 : here - 1; });
    return log_p;
  }

  // Writes the masses of all nodes from the shares; log P must not be -inf.
  __device__ void masses() {
    const int32_t R = table_.ring_frames();
    const int64_t slots = int64_t(R) * (columns_ + 1);
    for (int64_t i = threadIdx.x; i < 2 * slots; i += blockDim.x) blanks_[i] = 0;
    __syncthreads();
    if (threadIdx.x == 0) blanks_[0] = 1;
    int32_t here = 0;
    walk<1>(
        table_.count + 1,
        [&](TdtNode node, Pair* pairs, const Pair* inputs) {
          if (pairs == nullptr) return;
          push_node(node, here, pairs, inputs);
        },
        [&] { here = later(here, 1); });
  }

 private:
  RNNT_DEVICE int32_t last_step() const {
    return lattice_.frames + lattice_.lag * lattice_.symbols - 1;
  }
  RNNT_DEVICE int32_t slot(int32_t step, int32_t u) const { return step * (columns_ + 1) + u; }
  // The ring's step `distance` behind.
  RNNT_DEVICE int32_t later(int32_t step, int32_t distance) const {
    const int32_t sum = step + distance, R = table_.ring_frames();
    return sum >= R ? sum - R : sum;
  }

  // Calls visit(node, its pairs, its inputs) for the nodes of each step t + lag u, upwards or
  // downwards, and next() after each step. `count` pairs of a node are its inputs.
  template <int direction, typename Visit, typename Next>
  RNNT_DEVICE void walk(int32_t count, Visit&& visit, Next&& next) {
    const int32_t T = lattice_.frames, U = lattice_.symbols, lag = lattice_.lag;
    const int32_t last = last_step(), first = direction > 0 ? 0 : last;
    const bool has_column = int32_t(threadIdx.x) <= U;
    const auto request = [&](int32_t step, int32_t line, int32_t place) {
      const int32_t u = threadIdx.x, t = step - lag * u;
      if (t >= 0 && t < T) {
        const Pair* const pairs = lattice_.pairs_of(t, u, line);
        Pair* const inputs = inputs_of(place);
        if (pairs != nullptr) {
#pragma unroll
          for (int i = 0; i < tdt_inputs(most); ++i) {
            if (i >= count) break;
            copy_async(inputs + i * blockDim.x, pairs + int64_t(i) * lattice_.width);
          }
        }
      }
      commit_copies();
    };
    int32_t line = first % T, line_ahead = line, place = 0, place_ahead = kTdtAhead - 1;
    if (is_ahead) {
      for (int32_t i = 0; i < kTdtAhead - 1; ++i) {
        if (has_column) request(first + direction * i, line_ahead, i);
        line_ahead = moved(line_ahead, direction, T);
      }
    }
    __syncthreads();
    for (int32_t k = 0; k <= last; ++k) {
      const int32_t step = first + direction * k;
      for (int32_t u = threadIdx.x; u <= U; u += blockDim.x) {
        const int32_t t = step - lag * u;
        if (t < 0 || t >= T) continue;
        Pair* const pairs = lattice_.pairs_of(t, u, line);
        if (is_ahead) wait_copies<kTdtAhead - 2>();
        visit(TdtNode{t, u}, pairs, is_ahead ? inputs_of(place) : pairs);
      }
      if (is_ahead && has_column) {
        request(step + direction * (kTdtAhead - 1), line_ahead, place_ahead);
      }
      line = moved(line, direction, T);
      line_ahead = moved(line_ahead, direction, T);
      place = moved(place, 1, kTdtAhead);
      place_ahead = moved(place_ahead, 1, kTdtAhead);
      next();
      __syncthreads();
    }
    if (is_ahead) wait_copies<0>();
    __syncthreads();
  }
  // The neighbour of `index` in a circle of so many.
  RNNT_DEVICE static int32_t moved(int32_t index, int32_t direction, int32_t count) {
    if (direction > 0) return index + 1 == count ? 0 : index + 1;
    return index == 0 ? count - 1 : index - 1;
  }
  // Pair i of the inputs is i * blockDim.x behind.
  RNNT_DEVICE Pair* inputs_of(int32_t place) const {
    return inputs_ + place * (tdt_inputs(most) * blockDim.x) + threadIdx.x;
  }

  // Between a node's inputs.
  RNNT_DEVICE auto distance() const {
    if constexpr (is_ahead) {
      return int32_t(blockDim.x);
    } else {
      return int64_t(lattice_.width);
    }
  }

  RNNT_DEVICE Number sum_node(TdtNode node, int32_t here, const Pair* inputs) {
    // The slots exist, whatever is in them.
    const auto beta = [&](int32_t there, int32_t u) {
      const Pair pair = load_vector<2>(betas_[slot(there, u)].x);
      return Number::load(&pair.x[0], &pair.x[1]);
    };
    Number above[most], beside[most], arrive[2 * most];
#pragma unroll
    for (int n = 0; n < most; ++n) {
      above[n] = beta(later(here, table_.of[n] + lattice_.lag), node.u + 1);
      beside[n] = beta(later(here, table_.of[n]), node.u);
    }
    const auto weights =
        TdtWeights<real, most>::template load<is_ahead>(inputs, distance(), table_.count);
    arrivals(lattice_, table_, node, weights, above, beside, arrive);
    Number total = sum_of(arrive);
    total.normalise();
    return total;
  }

  RNNT_DEVICE void push_node(TdtNode node, int32_t here, Pair* pairs, const Pair* inputs) {
    const int32_t T = lattice_.frames, K = table_.count, u = node.u;
    double &by_blank = blanks_[slot(here, u)], &by_symbol = symbols_[slot(here, u)];
    const double mass = by_blank + by_symbol;
    // All targets are read before the first is written: they differ, so that nothing waits for a
    // sum but those that follow it.
    double to_symbol[most], to_blank[most];
    Pair shares[most];
#pragma unroll
    for (int n = 0; n < most; ++n) {
      to_symbol[n] = symbols_[slot(later(here, table_.of[n] + lattice_.lag), u + 1)];
      to_blank[n] = blanks_[slot(later(here, table_.of[n]), u)];
      shares[n] = is_ahead || n < K ? load_vector<2>(inputs[n * distance()].x) : Pair{};
    }
    by_blank = by_symbol = 0;
    const double each = mass + mass * static_cast<double>(inputs[K * distance()].x[0]);
    pairs[int64_t(K) * lattice_.width].x[1] = static_cast<real>(each);
#pragma unroll
    for (int n = 0; n < most; ++n) {
      const int32_t duration = table_.of[n];
      const bool inside = n < K && node.t + duration < T;
      if (inside && u < lattice_.symbols) {
        symbols_[slot(later(here, duration + lattice_.lag), u + 1)] =
            to_symbol[n] + each * static_cast<double>(shares[n].x[0]);
      }
      if (inside && duration > 0) {
        blanks_[slot(later(here, duration), u)] =
            to_blank[n] + each * static_cast<double>(shares[n].x[1]);
      }
    }
  }

  const TdtLattice<real>& lattice_;
  const DurationTable& table_;
  // The ring, of beta and then of masses: what blanks and symbols bring to a node.
  Pair* const betas_;
  double *const blanks_, *const symbols_;
  const int32_t columns_;
  Pair* const inputs_;
};

}  // namespace pruned_rnnt::cuda
