// The sizes of a pruned step, and where its buffers lie in the few pieces of memory that its caller
// allocates for it: one allocation costs the host as much as two launches.
//
// Axes as in pruned_rnnt/ops/pruned_step.py; W = U+1 columns of the lattice; C rows of a chunk.
#pragma once

#include <algorithm>
#include <array>
#include <initializer_list>
#include <vector>

#include "stable.h"

namespace pruned_rnnt {
namespace cuda {

inline int64_t round_up(int64_t size, int64_t multiple) {
  return (size + multiple - 1) / multiple * multiple;
}

// The integers of a step, in the order of StepSizes in pruned_rnnt/ops/native_step.py.
struct StepSizes {
  explicit StepSizes(const std::vector<int64_t>& x)
      : N(x.at(0)),
        T(x.at(1)),
        W(x.at(2)),
        E(x.at(3)),
        P(x.at(4)),
        D(x.at(5)),
        V(x.at(6)),
        S(x.at(7)),
        rows(x.at(8)),
        chunk_rows(x.at(9)),
        hidden_rows(x.at(10)),
        blank(x.at(11)),
        rnnt_type(x.at(12)),
        mode(x.at(13)),
        activation(x.at(14)),
        exact_bounds(x.at(15) != 0),
        differentiable(x.at(16) != 0),
        reduced(x.at(17)),
        split(x.at(18) != 0),
        cast_encoder(x.at(19) != 0),
        cast_predictor(x.at(20) != 0) {
    static constexpr ScalarType kTypes[] = {ScalarType::Float, ScalarType::Double, ScalarType::Half,
                                            ScalarType::BFloat16};
    type = kTypes[x.at(21)];
    acc = type == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
    padded_V = round_up(V, 16 / element_bytes(type));
    // simple_products.py
    stored = split ? ScalarType::BFloat16 : acc;
    summed = split && type != ScalarType::Float ? ScalarType::BFloat16 : acc;
    parts = split && type == ScalarType::Float ? 3 : 1;
    stored_V = round_up(padded_V, split ? 8 : 1);
    stored_W = round_up(W, split ? 8 : 1);
  }

  int64_t columns_of(int layer) const { return std::array<int64_t, 5>{E, P, E, P, D}[layer]; }
  // Rows of a layer's weight, with padding.
  int64_t outputs_of(int layer) const {
    return std::array<int64_t, 5>{padded_V, padded_V, D, D, padded_V}[layer];
  }

  int64_t N, T, W, E, P, D, V, S, rows, chunk_rows, hidden_rows, blank, rnnt_type, mode, activation;
  bool exact_bounds, differentiable;
  int64_t reduced;  // 0 none, 1 sum, 2 mean
  bool split, cast_encoder, cast_predictor;
  ScalarType type, acc, stored, summed;
  int64_t padded_V, stored_V, stored_W, parts;
};

// The floating-point options, in the order of StepScales in native_step.py.
struct StepScales {
  explicit StepScales(const std::vector<double>& x)
      : lm_only(x.at(0)),
        delay_penalty(x.at(1)),
        fastemit_lambda(x.at(2)),
        clamp(x.at(3)),
        simple(x.at(4)),
        pruned(x.at(5)) {}

  double lm_only, delay_penalty, fastemit_lambda, clamp, simple, pruned;
};

// A buffer inside a piece of memory.
struct Slot {
  int64_t offset = 0;
  std::array<int64_t, 4> sizes{};
  int dims = 0;
  ScalarType type = ScalarType::Float;

  Tensor in(const Tensor& memory) const {
    std::array<int64_t, 4> strides{};
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
  // As a matrix: the last dimension are columns, all before it rows.
  Tensor matrix_in(const Tensor& memory) const { return rows_in(memory, 0, row_count()); }
  Tensor transposed_in(const Tensor& memory) const {
    return made(memory, 0, {columns(), row_count()}, {1, columns()}, 2);
  }
  // Rows begin .. begin + count of the matrix; only its first `kept` columns.
  Tensor rows_in(const Tensor& memory, int64_t begin, int64_t count, int64_t kept = 0) const {
    return made(memory, begin * columns(), {count, kept > 0 ? kept : columns()}, {columns(), 1}, 2);
  }

  int64_t columns() const { return sizes[dims - 1]; }
  int64_t row_count() const {
    int64_t count = 1;
    for (int i = 0; i + 1 < dims; ++i) count *= sizes[i];
    return count;
  }

 private:
  Tensor made(const Tensor& memory, int64_t begin, const std::array<int64_t, 4>& shape,
              const std::array<int64_t, 4>& strides, int count) const {
    const auto device = static_cast<torch::stable::DeviceIndex>(memory.get_device_index());
    return torch::stable::from_blob(
        static_cast<char*>(memory.data_ptr()) + offset + begin * element_bytes(type),
        {shape.data(), static_cast<size_t>(count)}, {strides.data(), static_cast<size_t>(count)},
        torch::stable::Device(torch::headeronly::DeviceType::CUDA, device), type);
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

// Parts of column_sums, as parts_of in pruned_rnnt/ops/column_sums.py.
inline int64_t parts_of(int64_t rows, int64_t columns) {
  const int64_t most = std::max<int64_t>(1, 512 * 1024 / std::max<int64_t>(columns, 1024));
  return std::min(std::max<int64_t>(1, rows / 32), most);
}

// From the forward to the backward pass.
struct SavedLayout {
  explicit SavedLayout(const StepSizes& s) {
    Carver carver;
    if (s.cast_encoder) encoder = carver.take(s.type, {s.N, s.T, s.E});
    if (s.cast_predictor) predictor = carver.take(s.type, {s.N, s.W, s.P});
    for (int layer = 0; layer < 5; ++layer) {
      weight[layer] = carver.take(s.type, {s.outputs_of(layer), s.columns_of(layer)});
      bias[layer] = carver.take(s.type, {s.outputs_of(layer)});
    }
    am = carver.take(s.type, {s.N, s.T, s.D});
    lm = carver.take(s.type, {s.N, s.W, s.D});
    totals = carver.take(s.acc, {2, s.N});
    lse = carver.take(s.acc, {s.rows});
    gx = carver.take(s.acc, {s.rows});
    gy = carver.take(s.acc, {s.rows});
    if (s.differentiable) {
      unit_am = carver.take(s.type, {s.N, s.T, s.padded_V});
      unit_lm = carver.take(s.type, {s.N, s.W, s.padded_V});
    }
    bytes = carver.bytes();
  }

  Slot encoder, predictor, weight[5], bias[5], am, lm, totals, lse, gx, gy, unit_am, unit_lm;
  int64_t bytes;
};

// Of the forward pass: first the simple loss, then, in the same place, the pruned one, whose hidden
// rows and logits are kept for the backward pass where they are one chunk.
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
    if (s.exact_bounds) scratch = carver.take(ScalarType::Int, {s.N, s.T, s.W});
    if (s.differentiable) {
      ones = carver.take(s.acc, {s.N});
      weights = carver.take(s.stored, {s.N, s.T, s.parts, s.stored_W});
      if (s.parts == 3) lm_stack = carver.take(s.stored, {s.N, 3 * s.stored_W, s.stored_V});
      // Low parts of 16-bit inputs are not needed any more: same type, same size.
      const bool reused = s.split && s.parts == 1;
      am_sum = reused ? am_low : carver.take(s.summed, {s.N, s.T, s.stored_V});
      lm_sum = reused ? lm_low : carver.take(s.summed, {s.N, s.stored_W, s.stored_V});
    }
    carver.start_again();
    hidden = carver.take(s.type, {s.chunk_rows, s.D});
    logits = carver.take(s.type, {s.chunk_rows, s.padded_V});
    for (Slot& slot : band) slot = carver.take(s.acc, {s.rows});
    row_bytes = carver.used();
    bytes = carver.bytes();
  }

  Slot simple_am, simple_lm, am_rows, lm_rows, am_high, am_low, lm_high, lm_low;
  Slot product, lattice[5];  // px, py, logz, alpha, beta
  Slot scratch, ones, weights, lm_stack, am_sum, lm_sum;
  Slot hidden, logits, band[4];  // px, py, alpha, beta
  int64_t bytes, row_bytes;      // row_bytes: without the simple loss
};

// What the backward pass of the rows hands to that of the layers.
struct GradientLayout {
  explicit GradientLayout(const StepSizes& s) {
    Carver carver;
    upstream = carver.take(s.acc, {2, s.N});
    am = carver.take(s.type, {s.N, s.T, s.D});
    lm = carver.take(s.type, {s.N, s.W, s.D});
    bytes = carver.bytes();
  }

  Slot upstream, am, lm;
  int64_t bytes;
};

// Scratch of the backward pass of the rows.
struct RowScratchLayout {
  explicit RowScratchLayout(const StepSizes& s) {
    Carver carver;
    lm = carver.take(s.acc, {s.N, s.W, s.D});
    hidden = carver.take(s.type, {std::min(s.hidden_rows, s.chunk_rows), s.D});
    partial = carver.take(s.acc, {parts_of(s.chunk_rows, s.padded_V), s.padded_V});
    bytes = carver.bytes();
  }

  // The workspace of column_sums for that many rows of logits.
  Tensor partial_of(const Tensor& scratch, int64_t rows, const StepSizes& s) const {
    Slot slot = partial;
    slot.sizes[0] = parts_of(rows, s.padded_V);
    return slot.in(scratch);
  }

  Slot lm, hidden, partial;
  int64_t bytes;
};

// Scratch of the backward pass of the layers.
struct LayerScratchLayout {
  explicit LayerScratchLayout(const StepSizes& s) {
    Carver carver;
    am = carver.take(s.type, {s.N, s.T, s.padded_V});
    lm = carver.take(s.type, {s.N, s.W, s.padded_V});
    int64_t most = 0;
    for (const int64_t columns : {s.padded_V, s.D}) {
      for (const int64_t rows : {s.N * s.T, s.N * s.W}) {
        most = std::max(most, parts_of(rows, columns) * columns);
      }
    }
    partial = carver.take(s.acc, {most});
    bytes = carver.bytes();
  }

  // The workspace of column_sums for a matrix of that size.
  Tensor partial_of(const Tensor& scratch, int64_t rows, int64_t columns) const {
    Slot slot = partial;
    slot.sizes = {parts_of(rows, columns), columns};
    slot.dims = 2;
    return slot.in(scratch);
  }

  Slot am, lm, partial;
  int64_t bytes;
};

}  // namespace cuda
}  // namespace pruned_rnnt
