// Products of a few rows with a weight matrix, as a search needs them in every frame: a library's
// product of four rows takes longer to start than to compute.
#pragma once

#include <algorithm>

#include "cpu/common/parallel.h"
#include "cpu/common/vectorise.h"

namespace pruned_rnnt {

// y(r, o) = bias(o) + sum_i x(r, i) w(o, i), all rows without gaps.
struct RowProduct {
  const float* x;
  const float* weight;
  const float* bias;
  int64_t rows, inputs, outputs;
  float* y;

  // Rows and outputs of a tile. Its sums stay in registers, and all rows read an output's weights
  // while they are in the nearest cache.
  static constexpr int64_t kTile = 4;
  // Multiplications of a task: far more time than it takes to wake a thread, in every frame.
  static constexpr int64_t kTask = 1 << 21;

  // Tiles at the end of the matrix compute their last row and output again: with one loop for all
  // tiles a sum does not depend on the other rows.
  struct Tiles {
    static PRUNED_RNNT_INLINE void run(const RowProduct* product, int64_t begin, int64_t end) {
      const RowProduct p = *product;
      for (int64_t o = begin; o < end; o += kTile) {
        const auto weights = [&](int64_t k) {
          return p.weight + std::min(o + k, p.outputs - 1) * p.inputs;
        };
        const float *w0 = weights(0), *w1 = weights(1), *w2 = weights(2), *w3 = weights(3);
        for (int64_t r = 0; r < p.rows; r += kTile) {
          const auto row = [&](int64_t k) { return p.x + std::min(r + k, p.rows - 1) * p.inputs; };
          const float *x0 = row(0), *x1 = row(1), *x2 = row(2), *x3 = row(3);
          float a0 = 0, a1 = 0, a2 = 0, a3 = 0, b0 = 0, b1 = 0, b2 = 0, b3 = 0;
          float c0 = 0, c1 = 0, c2 = 0, c3 = 0, d0 = 0, d1 = 0, d2 = 0, d3 = 0;
#pragma omp simd reduction(+ : a0, a1, a2, a3, b0, b1, b2, b3, c0, c1, c2, c3, d0, d1, d2, d3)
          for (int64_t i = 0; i < p.inputs; ++i) {
            const float a = x0[i], b = x1[i], c = x2[i], d = x3[i];
            a0 += a * w0[i], a1 += a * w1[i], a2 += a * w2[i], a3 += a * w3[i];
            b0 += b * w0[i], b1 += b * w1[i], b2 += b * w2[i], b3 += b * w3[i];
            c0 += c * w0[i], c1 += c * w1[i], c2 += c * w2[i], c3 += c * w3[i];
            d0 += d * w0[i], d1 += d * w1[i], d2 += d * w2[i], d3 += d * w3[i];
          }
          const float sums[kTile][kTile] = {
              {a0, a1, a2, a3}, {b0, b1, b2, b3}, {c0, c1, c2, c3}, {d0, d1, d2, d3}};
          for (int64_t k = 0; k < std::min(kTile, p.rows - r); ++k) {
            for (int64_t j = 0; j < std::min(kTile, p.outputs - o); ++j) {
              p.y[(r + k) * p.outputs + o + j] = sums[k][j] + p.bias[o + j];
            }
          }
        }
      }
    }
  };

  void run() const {
    if (rows == 0) return;
    const int64_t tiles = (outputs + kTile - 1) / kTile;
    const int64_t grain = std::max<int64_t>(1, kTask / (rows * inputs * kTile + 1));
    parallel_tasks(tiles, grain, [this](int64_t begin, int64_t end) {
      run_vectorised<Tiles>(this, begin * kTile, std::min(end * kTile, outputs));
    });
  }
};

}  // namespace pruned_rnnt
