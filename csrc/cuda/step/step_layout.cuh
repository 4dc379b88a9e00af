// Where the buffers of a pruned step lie in the few pieces of memory that its caller allocates for
// it: one allocation costs the host as much as two launches.
//
// Axes as in pruned_rnnt/ops/step/pruned_step.py; W = U+1 columns of the lattice; C rows of a
// chunk.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>

#include "cuda/lattice/halves.cuh"
#include "cuda/step/step_sizes.cuh"

namespace pruned_rnnt {
namespace cuda {

// A buffer inside a piece of memory.
struct Slot {
  int64_t offset = 0;
  std::array<int64_t, kMostDims> sizes{};
  int dims = 0;
  ScalarType type = ScalarType::Float;

  View in(const View& memory) const {
    std::array<int64_t, kMostDims> strides{};
    int64_t stride = 1;
    for (int i = dims - 1; i >= 0; --i) {
      strides[i] = stride;
      stride *= sizes[i];
    }
    return made(memory, 0, sizes, strides, dims);
  }

  // The `which`-th of the parts that the first dimension counts.
  Slot part(int64_t which) const {
    Slot slot = *this;
    int64_t count = 1;
    for (int i = 1; i < dims; ++i) count *= slot.sizes[i - 1] = sizes[i];
    --slot.dims;
    slot.offset += which * count * element_bytes(type);
    return slot;
  }
  // Rows begin .. begin + count of a matrix.
  Slot rows(int64_t begin, int64_t count) const {
    Slot slot = *this;
    slot.offset += begin * columns() * element_bytes(type);
    slot.sizes[0] = count;
    return slot;
  }
  // Columns begin .. begin + count of (N,rows,columns), which stay as far apart as they are.
  View columns_in(const View& memory, int64_t begin, int64_t count) const {
    return made(memory, begin, {sizes[0], sizes[1], count}, {sizes[1] * columns(), columns(), 1},
                3);
  }
  // As a matrix, whose columns are the last dimension: rows begin .. begin + count, and of these
  // only the first `kept` columns.
  View rows_in(const View& memory, int64_t begin, int64_t count, int64_t kept = 0) const {
    return made(memory, begin * columns(), {count, kept > 0 ? kept : columns()}, {columns(), 1}, 2);
  }

  int64_t columns() const { return sizes[dims - 1]; }
  int64_t bytes() const { return dims == 0 ? 0 : row_count() * columns() * element_bytes(type); }
  int64_t end() const { return offset + bytes(); }
  int64_t row_count() const {
    int64_t count = 1;
    for (int i = 0; i + 1 < dims; ++i) count *= sizes[i];
    return count;
  }

 private:
  View made(const View& memory, int64_t begin, const std::array<int64_t, kMostDims>& shape,
            const std::array<int64_t, kMostDims>& strides, int count) const {
    return {static_cast<char*>(memory.data_ptr()) + offset + begin * element_bytes(type), type,
            count, shape, strides};
  }
};

class Carver {
 public:
  Slot take(ScalarType type, std::initializer_list<int64_t> sizes) {
    Slot slot;
    slot.offset = bytes_;
    slot.type = type;
    int64_t count = 1;
    for (const int64_t size : sizes) {
      slot.sizes[slot.dims++] = size;
      count *= size;
    }
    bytes_ = round_up(bytes_ + count * element_bytes(type), 256);
    most_ = std::max(most_, bytes_);
    return slot;
  }
  // Lets what follows lie where the buffers so far have been.
  void start_again() { bytes_ = 0; }
  int64_t used() const { return bytes_; }
  int64_t bytes() const { return most_; }

 private:
  int64_t bytes_ = 0, most_ = 0;
};

// Parts of column_sums, as parts_of in pruned_rnnt/ops/common/column_sums.py.
inline int64_t parts_of(int64_t rows, int64_t columns) {
  const int64_t most = std::max<int64_t>(1, 512 * 1024 / std::max<int64_t>(columns, 1024));
  return std::min(std::max<int64_t>(1, rows / 32), most);
}

// What the passes hand on. A side's two layers lie under each other, and their outputs' gradients
// side by side, so that the backward pass of both is one product.
struct SavedLayout {
  explicit SavedLayout(const StepSizes& s) {
    Carver carver;
    if (s.cast_encoder) input[kEncoderSide] = carver.take(s.type, {s.N, s.T, s.E});
    if (s.cast_predictor) input[kPredictorSide] = carver.take(s.type, {s.N, s.W, s.P});
    for (const int side : {kEncoderSide, kPredictorSide}) {
      weights[side] = carver.take(s.type, {s.side_outputs(), s.columns_of(side)});
      weight[kAm + side] = weights[side].rows(0, s.padded_V);
      weight[kEncoder + side] = weights[side].rows(s.padded_V, s.D);
    }
    weight[kOutput] = carver.take(s.type, {s.padded_V, s.D});
    for (int layer = 0; layer < kLayers; ++layer) {
      bias[layer] = carver.take(s.type, {s.outputs_of(layer)});
    }
    totals = carver.take(s.acc, {2, s.N});
    lse = carver.take(s.acc, {s.rows});
    gx = carver.take(s.acc, {s.rows});
    gy = carver.take(s.acc, {s.rows});
    if (s.packed) {
      logit_lengths = carver.take(ScalarType::Int, {s.N});
      target_lengths = carver.take(ScalarType::Int, {s.N});
      row_splits = carver.take(ScalarType::Long, {s.N + 1});
    }
    if (s.differentiable) {
      upstream = carver.take(s.acc, {2, s.N});
      lm_sums = carver.take(s.acc, {s.N, s.W, s.D});
      for (const int side : {kEncoderSide, kPredictorSide}) {
        const int64_t outputs = s.side_outputs();
        partial[side] = carver.take(s.acc, {parts_of(s.rows_of(side), outputs), outputs});
      }
    }
    // Without gradients only what the joiner reads.
    const int64_t before = s.differentiable ? s.padded_V : 0;
    for (const int side : {kEncoderSide, kPredictorSide}) {
      outputs[side] = carver.take(s.type, {s.N, s.length_of(side), before + s.D});
    }
    joiner_begin = before;
    bytes = carver.bytes();
  }

  // A side's input in the type of the products: cast, or as it is given.
  View input_of(int side, const View& given, const View& memory) const {
    return input[side].dims > 0 ? input[side].in(memory) : given;
  }
  // What the joiner reads of a side: am or lm.
  View joiner_input(int side, const View& memory) const {
    return outputs[side].columns_in(memory, joiner_begin, outputs[side].columns() - joiner_begin);
  }

  Slot input[kSides], weights[kSides], weight[kLayers], bias[kLayers];
  Slot totals, lse, gx, gy, logit_lengths, target_lengths, row_splits;
  Slot upstream;  // gradients of the simple and of the pruned losses
  // Gradients of the outputs of the simple loss's layer, and beside them what the joiner's layer
  // puts out, until nothing reads it any more; then its gradients.
  Slot outputs[kSides];
  int64_t joiner_begin;
  Slot lm_sums, partial[kSides];  // what gradients of lm and of the biases are summed up in
  int64_t bytes;
};

// First of the simple loss, then, in the same place, of the pruned one, whose last chunk of hidden
// rows and logits is kept for its backward pass.
struct WorkLayout {
  explicit WorkLayout(const StepSizes& s) {
    Carver carver;
    simple_am = carver.take(s.type, {s.N, s.T, s.padded_V});
    simple_lm = carver.take(s.type, {s.N, s.W, s.padded_V});
    am_rows = carver.take(s.acc, {2, s.N, s.T});
    lm_rows = carver.take(s.acc, {2, s.N, s.W});
    am_high = carver.take(s.stored, {s.N, s.T, s.stored_V});
    lm_high = carver.take(s.stored, {s.N, s.stored_W, s.stored_V});
    if (s.split) {
      am_low = carver.take(s.stored, {s.N, s.T, s.stored_V});
      lm_low = carver.take(s.stored, {s.N, s.stored_W, s.stored_V});
    }
    product = carver.take(s.acc, {s.N, s.T, s.stored_W});
    for (Slot& slot : lattice) slot = carver.take(s.acc, {s.N, s.T, s.W});
    lattice_work = carver.take(s.acc, {s.N * CutMemory<float>::elements(s.W, s.T)});
    if (s.exact_bounds) scratch = carver.take(ScalarType::Int, {s.N, s.T, s.W});
    if (s.differentiable) {
      weights = carver.take(s.stored, {s.N, s.T, s.parts, s.stored_W});
      if (s.parts == 3) lm_stack = carver.take(s.stored, {s.N, 3 * s.stored_W, s.stored_V});
      // Low parts of 16-bit inputs are not needed any more: same type, same size.
      const bool reused = s.split && s.parts == 1;
      am_sum = reused ? am_low : carver.take(s.summed, {s.N, s.T, s.stored_V});
      lm_sum = reused ? lm_low : carver.take(s.summed, {s.N, s.stored_W, s.stored_V});
    }
    simple_bytes = carver.used();
    carver.start_again();
    hidden = carver.take(s.type, {s.chunk_rows, s.D});
    if (s.differentiable) {
      // Right before the logits: the gradient of hidden rows begins here and goes on where the
      // gradients of logits have been read.
      first_rows = round_up(std::min(s.hidden_rows, s.chunk_rows), 128);
      grad_hidden = carver.take(s.type, {first_rows, s.D});
    }
    logits = carver.take(s.type, {s.chunk_rows, s.padded_V});
    for (Slot& slot : band) slot = carver.take(s.acc, {s.rows});
    band_work = carver.take(s.acc, {s.N * CutMemory<float>::elements(s.S, s.T)});
    if (s.differentiable) {
      partial = carver.take(s.acc, {parts_of(s.chunk_rows, s.padded_V), s.padded_V});
    }
    band_bytes = carver.used() - band[0].offset;
    bytes = carver.bytes();
  }

  // Hidden rows whose gradient has room, once `done` rows of logits are read.
  int64_t hidden_rows_after(int64_t done) const {
    return first_rows + done * logits.columns() / hidden.columns();
  }
  // The workspace of column_sums for that many rows of logits.
  View partial_in(const View& memory, int64_t rows) const {
    Slot slot = partial;
    slot.sizes[0] = parts_of(rows, slot.columns());
    return slot.in(memory);
  }

  Slot simple_am, simple_lm, am_rows, lm_rows, am_high, am_low, lm_high, lm_low;
  Slot product, lattice[3];  // px, py, logz
  Slot scratch, weights, lm_stack, am_sum, lm_sum;
  Slot hidden, logits, band[2];  // px, py
  Slot lattice_work, band_work;  // of the recursions
  Slot grad_hidden, partial;     // of the backward pass; grad_hidden is as long as hidden
  int64_t bytes, simple_bytes, band_bytes;  // band_bytes: from the band on
  int64_t first_rows = 0;
};

// Rows of a chunk: those that are asked for, or more if the simple loss has left room for them.
inline int64_t roomy_chunk_rows(const StepSizes& s) {
  const WorkLayout layout(s);
  const int64_t frame_bytes = s.S * (s.D + s.padded_V) * element_bytes(s.type);
  const int64_t band_bytes = layout.band_bytes + layout.grad_hidden.bytes();
  const int64_t frames = s.rows / s.S;
  const int64_t fitting = (layout.simple_bytes - band_bytes) / frame_bytes - 1;
  if (fitting * s.S <= s.chunk_rows) return s.chunk_rows;
  const int64_t chunks = (frames + fitting - 1) / fitting;
  return (frames + chunks - 1) / chunks * s.S;
}

// Elements of the gradients that are sums over all rows, behind each other: weight and bias of the
// output layer, with the rows that padding adds, because products of other widths take half as long
// again, and the biases of each side.
struct SumLayout {
  explicit SumLayout(const StepSizes& s)
      : output_bias(s.padded_V * s.D),
        biases{output_bias + s.padded_V, output_bias + s.padded_V + s.side_outputs()},
        count(biases[1] + s.side_outputs()) {}

  int64_t output_bias, biases[kSides], count;
};

}  // namespace cuda
}  // namespace pruned_rnnt
