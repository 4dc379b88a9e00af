// Tiles of a factor of a float32 product, from global to shared memory, and from there to the
// fragments of the tensor cores' m16n8k8.
//
// A factor is a matrix of lines, whose elements are adjacent. Its tile has `extent` rows of the
// result (columns, of the second factor) and `depth` elements of the sum, and lines along one of
// these:
//
//   k_lines false:                         k_lines true:
//        k ->                                 rows or columns ->
//   row  [x x x x ..] + 4 floats          k   [x x x x x x x x ..] + 8 floats
//        [x x x x ..] + 4                     [x x x x x x x x ..] + 8
//
// The floats behind each line, never read, spread what a warp reads at a time over all banks.
//
// Fragments: with g = lane / 4 and i = lane % 4, a lane has of a 16 x 8 tile of the first factor
// (g,i), (g+8,i), (g,i+4), (g+8,i+4), and of an 8 x 8 tile of the second one (k i, column g) and
// (k i+4, column g).
#pragma once

#include "cuda/common/async_copy.cuh"

namespace pruned_rnnt::cuda {

// Where the elements of a factor are. `lines` are `stride` elements apart.
struct FactorLines {
  const float* data;
  int64_t stride;
};

// Four 8 x 8 matrices of 16-bit words, which are 8 x 4 matrices of floats: lane l passes the
// address of row l % 8 of matrix l / 8, and gets of each matrix the float l % 4 of row l / 4.
RNNT_DEVICE void load_matrices(const float* row, float& w, float& x, float& y, float& z) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const uint32_t address = uint32_t(__cvta_generic_to_shared(row));
  uint32_t words[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(address)
               : "memory");
  w = __uint_as_float(words[0]);
  x = __uint_as_float(words[1]);
  y = __uint_as_float(words[2]);
  z = __uint_as_float(words[3]);
#endif
}

// The tiles of one factor that a block needs. width: floats of a copy, 4 or 1.
template <int extent, int depth, int threads, bool k_lines, int width>
class FactorTiles {
 public:
  static constexpr int kPitch = k_lines ? extent + 8 : depth + 4;
  static constexpr int kFloats = kPitch * (k_lines ? depth : extent);

  // The tile begins at row (or column) `first` of `size` and at element `k` of the sum.
  RNNT_DEVICE FactorTiles(const FactorLines& lines, int32_t first, int32_t size, int32_t k)
      : data_(lines.data),
        lines_apart_(kLinesAbreast * lines.stride),
        tiles_apart_(k_lines ? depth * lines.stride : depth),
        line_(int(threadIdx.x) / kVectors),
        column_(int(threadIdx.x) % kVectors * width),
        left_(size - first - (k_lines ? column_ : line_)) {
    const int64_t line = (k_lines ? k : first) + line_, column = (k_lines ? first : k) + column_;
    next_ = data_ + line * lines.stride + column;
  }

  // Begins to copy the next tile; k_left: elements of the sum from its first on.
  RNNT_DEVICE void copy(float* tile, int32_t k_left) {
    const float* source = next_;
    float* target = tile + line_ * kPitch + column_;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      int elements = 0;
      if (k_lines) {
        if (line_ + i * kLinesAbreast < k_left) elements = min(max(left_, 0), width);
      } else {
        if (i * kLinesAbreast < left_) elements = min(max(k_left - column_, 0), width);
      }
      copy_async_or_zeros<width>(target, elements > 0 ? source : data_, elements);
      source += lines_apart_;
      target += kLinesAbreast * kPitch;
    }
    next_ += tiles_apart_;
  }

  // Of the first factor, 16 rows from `row` on and 8 elements of the sum from `k` on.
  RNNT_DEVICE static void rows_fragment(const float* tile, int row, int k, float (&x)[4]) {
    const int lane = threadIdx.x % 32;
    if constexpr (k_lines) {
      const float* at = tile + (k + lane % 4) * kPitch + row + lane / 4;
      x[0] = at[0];
      x[1] = at[8];
      x[2] = at[4 * kPitch];
      x[3] = at[4 * kPitch + 8];
    } else {
      const float* at = tile + (row + lane % 16) * kPitch + k + lane / 16 * 4;
      load_matrices(at, x[0], x[1], x[2], x[3]);
    }
  }

  // Of the second factor, two tiles of 8 columns from `column` on.
  RNNT_DEVICE static void columns_fragments(const float* tile, int column, int k, float (&x)[2],
                                            float (&y)[2]) {
    const int lane = threadIdx.x % 32;
    if constexpr (k_lines) {
      const float* at = tile + (k + lane % 4) * kPitch + column + lane / 4;
      x[0] = at[0];
      x[1] = at[4 * kPitch];
      y[0] = at[8];
      y[1] = at[4 * kPitch + 8];
    } else {
      const float* at = tile + (column + lane / 16 * 8 + lane % 8) * kPitch + k + lane / 8 % 2 * 4;
      load_matrices(at, x[0], x[1], y[0], y[1]);
    }
  }

 private:
  static constexpr int kVectors = (k_lines ? extent : depth) / width;  // of a line
  static constexpr int kLinesAbreast = threads / kVectors;
  static constexpr int kCopies = extent * depth / width / threads;
  static_assert(threads % kVectors == 0 && extent * depth % (width * threads) == 0);

  const float *data_, *next_;
  int64_t lines_apart_, tiles_apart_;
  int line_, column_;
  int32_t left_;  // rows or columns from this thread's first one on
};

}  // namespace pruned_rnnt::cuda
