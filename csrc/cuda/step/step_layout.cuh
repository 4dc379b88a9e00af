// Where the buffers of a pruned step are in the two pieces of memory that its caller allocates for
// it: one allocation takes the host as long as two launches.
//
// Axes as in pruned_rnnt/ops/step/step_library.py; C rows of a chunk.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <vector>

#include "cuda/step/step_fields.cuh"
#include "view.h"
#include "workspaces.h"

namespace pruned_rnnt::cuda {

inline View dense_view(void* data, ScalarType type, std::initializer_list<int64_t> shape) {
  std::array<int64_t, kMostDims> sizes{}, strides{};
  std::copy(shape.begin(), shape.end(), sizes.begin());
  const int dims = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int i = dims - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= sizes[i];
  }
  return {data, type, dims, sizes, strides};
}

inline void* data_at(const View& view, int64_t element) {
  return static_cast<char*>(view.data_ptr()) + element * element_bytes(view.scalar_type());
}
inline int64_t width_of(const View& view) { return view.size(view.dim() - 1); }

// Element `which` of the first dimension of a dense matrix, (2,N) or (2,N,T).
inline View part_of(const View& view, int64_t which) {
  void* const data = data_at(view, which * view.stride(0));
  if (view.dim() == 2) return dense_view(data, view.scalar_type(), {view.size(1)});
  return dense_view(data, view.scalar_type(), {view.size(1), view.size(2)});
}
// Rows begin .. begin + count of a dense buffer, as a matrix; of these only the first `columns`
// columns, or all.
inline View rows_of(const View& view, int64_t begin, int64_t count, int64_t columns = 0) {
  const int64_t width = width_of(view);
  return {data_at(view, begin * width),
          view.scalar_type(),
          2,
          {count, columns > 0 ? columns : width},
          {width, 1}};
}
// Elements begin .. begin + count of a dense buffer.
inline View range_of(const View& view, int64_t begin, int64_t count) {
  return dense_view(data_at(view, begin), view.scalar_type(), {count});
}
// Utterances begin .. begin + count of (N,...).
inline View utterances_of(const View& view, int64_t begin, int64_t count) {
  std::array<int64_t, kMostDims> sizes{}, strides{};
  for (int i = 0; i < view.dim(); ++i) {
    sizes[i] = i == 0 ? count : view.size(i);
    strides[i] = view.stride(i);
  }
  return {data_at(view, begin * view.stride(0)), view.scalar_type(), view.dim(), sizes, strides};
}
// Columns begin .. begin + count of (N,rows,columns), which stay as far apart as they are.
inline View columns_of(const View& view, int64_t begin, int64_t count) {
  return {data_at(view, begin),
          view.scalar_type(),
          3,
          {view.size(0), view.size(1), count},
          {view.stride(0), view.stride(1), 1}};
}

// Parts of a step in their order; kBand is the pruned loss with its backward pass. The sums of the
// trivial joiner's gradients overwrite the exponentials of am that kSimpleSums reads.
enum Phase { kScores, kLattice, kSimpleSums, kSimpleGradients, kBand };
// The first and the last part in which a buffer holds numbers that are still needed.
struct LiveRange {
  Phase first, last;
};
constexpr LiveRange kWholeStep{kScores, kBand};

// Cuts buffers from a piece of memory, one behind the other; of a null pointer only the sizes are
// used. In debug builds, buffers that share memory must not be live at the same time.
class Arena {
 public:
  explicit Arena(void* memory) : memory_(reinterpret_cast<uintptr_t>(memory)) {}

  View take(ScalarType type, std::initializer_list<int64_t> shape, LiveRange live = kWholeStep) {
    const View view = dense_view(reinterpret_cast<void*>(memory_ + used_), type, shape);
    used_ = round_up(used_ + view.numel() * element_bytes(type), 256);
    most_ = std::max(most_, used_);
    return reuse(view, live);
  }
  // A buffer of the type, size and place of another one.
  View reuse(const View& view, LiveRange live) {
#ifdef PRUNED_RNNT_DEBUG
    const uintptr_t begin = reinterpret_cast<uintptr_t>(view.data_ptr());
    const Occupied here{begin, begin + view.numel() * element_bytes(view.scalar_type()), live};
    for (const Occupied& other : occupied_) {
      const bool apart = here.end <= other.begin || other.end <= here.begin;
      const bool at_other_times = live.last < other.live.first || other.live.last < live.first;
      STD_TORCH_CHECK(apart || at_other_times,
                      "two buffers of a pruned step are live in the same memory");
    }
    if (here.begin < here.end) occupied_.push_back(here);
#else
    (void)live;
#endif
    return view;
  }
  // The buffers that follow share the memory of those from `used` on.
  void rewind(int64_t used = 0) { used_ = used; }
  int64_t used() const { return used_; }
  int64_t bytes() const { return most_; }

 private:
  struct Occupied {
    uintptr_t begin, end;
    LiveRange live;
  };

  uintptr_t memory_;
  int64_t used_ = 0, most_ = 0;
  std::vector<Occupied> occupied_;  // in debug builds
};

// The workspace of a recursion over lattices of so many rows, frames and columns.
inline int64_t lattice_elements(const StepSizes& s, int64_t rows, int64_t columns) {
  if (s.is_tdt()) return tdt_elements(rows, s.N, s.W - 1, s.K, s.longest);
  return cut_elements(s.N, columns, s.N * s.T);
}

// The buffers that forward leaves for backward. The weights of the two layers that read one input
// are neighbours, and so are their outputs' gradients, so that the backward pass of both is one
// product.
struct SavedBuffers {
  SavedBuffers(const StepSizes& s, void* memory) {
    Arena arena(memory);
    if (s.cast_encoder) input[kEncoderSide] = arena.take(s.type, {s.N, s.T, s.E});
    if (s.cast_predictor) input[kPredictorSide] = arena.take(s.type, {s.N, s.W, s.P});
    for (const int side : {kEncoderSide, kPredictorSide}) {
      weights[side] = arena.take(s.type, {s.side_outputs(), s.inputs_of(side)});
      weight[kAm + side] = rows_of(weights[side], 0, s.padded_V);
      weight[kEncoder + side] = rows_of(weights[side], s.padded_V, s.D + s.padded_K);
    }
    weight[kOutput] = arena.take(s.type, {s.padded_O, s.D});
    for (int layer = 0; layer < kLayers; ++layer) {
      bias[layer] = arena.take(s.type, {s.outputs_of(layer)});
    }
    totals = arena.take(s.acc, {2, s.N});
    for (View* const view : {&lse, &gx, &gy}) *view = arena.take(s.acc, {s.rows});
    for (View* const view : {&durations, &gd}) *view = arena.take(s.acc, {s.rows, s.K});
    if (s.packed) {
      logit_lengths = arena.take(ScalarType::Int, {s.N});
      target_lengths = arena.take(ScalarType::Int, {s.N});
      row_splits = arena.take(ScalarType::Long, {s.N + 1});
    }
    if (s.differentiable) {
      upstream = arena.take(s.acc, {2, s.N});
      lm_sums = arena.take(s.acc, {s.N, s.W, s.D});
      for (const int side : {kEncoderSide, kPredictorSide}) {
        const int64_t parts = parts_of(s.rows_of(side), s.side_outputs());
        partial[side] = arena.take(s.acc, {parts, s.side_outputs()});
      }
    }
    // Without gradients only the joiner's inputs.
    const int64_t before = s.differentiable ? s.padded_V : 0;
    for (const int side : {kEncoderSide, kPredictorSide}) {
      outputs[side] = arena.take(s.type, {s.N, s.length_of(side), before + s.D + s.padded_K});
      joiner_input[side] = columns_of(outputs[side], before, s.D);
      duration_input[side] = columns_of(outputs[side], before + s.D, s.padded_K);
    }
    bytes = arena.bytes();
  }

  // A side's input in the type of the products: the cast copy, or the caller's.
  const View& input_of(int side, const View& original) const {
    return input[side].dim() > 0 ? input[side] : original;
  }

  View input[kSides], weights[kSides], weight[kLayers], bias[kLayers];
  View totals, lse, gx, gy, logit_lengths, target_lengths, row_splits;
  View durations, gd;  // of TDT: log-probabilities of durations, and their occupancies
  View upstream;       // gradients of the simple and of the pruned losses
  // The gradients of the simple loss's layer's outputs, beside the joiner's inputs am and lm, which
  // the rows' backward pass overwrites with their gradients.
  View outputs[kSides], joiner_input[kSides], duration_input[kSides];
  View lm_sums, partial[kSides];  // sums over rows: the gradients of lm and of the biases
  int64_t bytes;
};

// The buffers of the simple loss and then, in the same memory, those of the pruned loss, whose last
// chunk of hidden rows and logits is kept for its backward pass.
struct WorkBuffers {
  WorkBuffers(const StepSizes& s, void* memory) {
    constexpr LiveRange simple{kScores, kSimpleGradients}, recursion{kScores, kLattice};
    constexpr LiveRange gradients{kSimpleSums, kSimpleGradients}, band{kBand, kBand};
    Arena arena(memory);
    simple_am = arena.take(s.type, {s.N, s.T, s.padded_V}, simple);
    simple_lm = arena.take(s.type, {s.N, s.W, s.padded_V}, simple);
    am_rows = arena.take(s.acc, {2, s.N, s.T}, simple);
    lm_rows = arena.take(s.acc, {2, s.N, s.W}, simple);
    am_exp = arena.take(s.exp_type, {s.N, s.am_parts, s.T, s.exp_V}, {kScores, kSimpleSums});
    lm_exp = arena.take(s.exp_type, {s.N, s.lm_parts, s.exp_W, s.exp_V}, simple);
    if (s.differentiable) {
      // Both parts of an exponential take the memory of a number in the accumulators' type.
      am_sum = arena.reuse(dense_view(am_exp.data_ptr(), s.acc, {s.N, s.T, s.exp_V}),
                           {kSimpleGradients, kSimpleGradients});
      STD_TORCH_CHECK(
          s.am_parts * element_bytes(s.exp_type) == element_bytes(s.acc),
          "pruned_rnnt: the exponentials of a pruned step do not have the size of sums");
    }
    product = arena.take(s.acc, {s.N, s.T, s.exp_W}, simple);
    logz = arena.take(s.acc, {s.N, s.T, s.W}, simple);
    if (s.is_tdt()) {
      durations = arena.take(s.acc, {s.N, s.T, s.W, s.K}, {kLattice, kSimpleGradients});
    }
    const int64_t before_recursion = arena.used();
    for (View* const view : {&px, &py}) *view = arena.take(s.acc, {s.N, s.T, s.W}, recursion);
    lattice_work = arena.take(s.acc, {lattice_elements(s, s.N * s.T * s.W, s.W)}, recursion);
    if (s.is_tdt()) {
      for (View* const view : {&left, &stayed}) {
        *view = arena.take(s.acc, {s.N, s.T, s.W}, recursion);
      }
      visits = arena.take(s.acc, {s.N, s.T}, recursion);
    }
    if (s.exact_bounds) bounds_work = arena.take(ScalarType::Int, {s.N, s.T, s.W}, recursion);
    const int64_t after_recursion = arena.used();
    if (s.differentiable) {
      arena.rewind(before_recursion);
      weights = arena.take(s.exp_type, {s.N, s.T, s.lm_parts, s.exp_W}, gradients);
      lm_sum = arena.take(s.acc, {s.exp_together, s.exp_W, s.exp_V}, gradients);
    }
    simple_bytes = std::max(arena.used(), after_recursion);
    arena.rewind();
    hidden = arena.take(s.type, {s.chunk_rows, s.D}, band);
    if (s.differentiable) {
      // Right before the logits: the gradient of hidden rows begins here and continues where the
      // gradients of logits have been read.
      first_rows = round_up(std::min(s.hidden_rows, s.chunk_rows), 128);
      grad_hidden = arena.take(s.type, {first_rows, s.D}, band);
    }
    logits = arena.take(s.type, {s.chunk_rows, s.padded_O}, band);
    const int64_t chunk_bytes = arena.used();
    for (View* const view : {&band_px, &band_py}) *view = arena.take(s.acc, {s.rows}, band);
    band_work = arena.take(s.acc, {lattice_elements(s, s.rows, s.S)}, band);
    if (s.is_tdt()) band_stay = arena.take(s.acc, {s.rows}, band);
    if (s.differentiable) {
      partial = arena.take(s.acc, {parts_of(s.chunk_rows, s.padded_O), s.padded_O}, band);
    }
    band_bytes = arena.used() - chunk_bytes;
    bytes = arena.bytes();
  }

  // Hidden rows whose gradient fits into memory, once `done` rows of logits are read.
  int64_t hidden_rows_after(int64_t done) const {
    const int64_t rows = first_rows + done * width_of(logits) / width_of(hidden);
    PRUNED_RNNT_ASSERT(
        data_at(grad_hidden, rows * width_of(hidden)) <= data_at(logits, done * width_of(logits)),
        "the gradient of hidden rows reaches logits that are not read");
    return rows;
  }

  View simple_am, simple_lm, am_rows, lm_rows, am_exp, lm_exp, product, logz;
  View px, py, lattice_work, bounds_work, weights, am_sum, lm_sum;
  // Of TDT: the simple loss's durations as in SavedBuffers, and tdt_band_masses.
  View durations, left, stayed, visits, band_stay;
  View hidden, grad_hidden, logits, band_px, band_py, band_work;
  View partial;                             // of column_sums
  int64_t bytes, simple_bytes, band_bytes;  // band_bytes: from band_px on
  int64_t first_rows = 0;
};

// Rows of a chunk: those that the caller asks for, or more if the simple loss leaves more memory.
inline int64_t roomy_chunk_rows(const StepSizes& s) {
  const WorkBuffers work(s, nullptr);
  const int64_t frame_bytes = s.S * (s.D + s.padded_O) * element_bytes(s.type);
  const int64_t hidden_bytes = work.first_rows * s.D * element_bytes(s.type);
  const int64_t frames = s.rows / s.S;
  const int64_t fitting = (work.simple_bytes - work.band_bytes - hidden_bytes) / frame_bytes - 1;
  if (fitting * s.S <= s.chunk_rows) return s.chunk_rows;
  const int64_t chunks = (frames + fitting - 1) / fitting;
  return (frames + chunks - 1) / chunks * s.S;
}

// The gradients that are sums over all rows, one behind the other: weight and bias of the output
// layer, with the rows that padding adds, because products of other widths take half as long again,
// and the biases of each side's two layers.
struct SumBuffers {
  SumBuffers(const StepSizes& s, void* memory)
      : weight(dense_view(memory, s.acc, {s.padded_O, s.D})),
        bias(after(weight, s.padded_O)),
        biases{after(bias, s.side_outputs()), after(biases[0], s.side_outputs())} {}

  static View after(const View& view, int64_t count) {
    return dense_view(data_at(view, view.numel()), view.scalar_type(), {count});
  }

  View weight, bias, biases[kSides];
};

}  // namespace pruned_rnnt::cuda
