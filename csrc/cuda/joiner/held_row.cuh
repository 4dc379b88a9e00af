// The log-sum-exp of a row of 16-bit logits that a group of 8 lanes holds in registers, in vectors
// of 16 bytes (8 logits):
//
//   lane                  0    1    2   ..   7
//   vector 0              0    1    2   ..   7      numbers of the row's vectors
//   vector 1              8    9   10   ..  15
//   ..
//   vector held-1        56   57   58   ..          the row may end here: -inf from column V on
//
// All vectors of a row are on their way at the same time. When the exponentials of a vector have
// been added, its registers take the same vector of the group's next row:
//
//   row i      maximum of all vectors     sum of vector 0, 1, .. held-1
//   row i+1                               load of vector 0, 1, .. held-1      maximum ..
//
// Axes: R rows, V vocabulary.
#pragma once

#include "cuda/common/arithmetic.cuh"
#include "cuda/common/packed_pair.cuh"
#include "cuda/joiner/logit_rows.cuh"

namespace pruned_rnnt::cuda {

constexpr int kHeldWidth = 8;
constexpr int kHeldThreads = 128;
// Of a multiprocessor: leaves 64 registers a thread.
constexpr int kHeldBlocks = 8;
// Bits of a warp's lanes that are the first of their groups.
constexpr uint32_t kFirstLanes = 0x01010101u;

// Whether groups of so many lanes hold rows that they load in vectors of `width` in registers.
template <typename scalar, int lanes, int width>
constexpr bool kIsHeld = sizeof(scalar) == 2 && width == kHeldWidth && lanes == kSmallGroup;

// A group takes rows_each adjacent rows; lane i of the group knows the node of row i.
struct HeldRange {
  static HeldRange of(int64_t begin, int64_t count) {
    HeldRange range{begin, count, kSmallGroup};
    // Fewer rows a group as long as there are too few blocks to fill the device.
    constexpr int64_t enough_blocks = 320;
    while (range.rows_each > 1 && range.blocks() < enough_blocks) range.rows_each /= 2;
    return range;
  }

  uint32_t blocks() const {
    const int64_t rows_a_block = int64_t(kHeldThreads / kSmallGroup) * rows_each;
    return uint32_t((count + rows_a_block - 1) / rows_a_block);
  }
  // Of this thread's group.
  RNNT_DEVICE int64_t first_row() const {
    return (int64_t(blockIdx.x) * (kHeldThreads / kSmallGroup) + threadIdx.x / kSmallGroup) *
           rows_each;
  }

  int64_t begin, count;
  int32_t rows_each;
};

// exp(x - maximum) as 2^(x scale + offset): one multiply-add for each x. The rounding of `offset`
// is the same factor in all terms, and log_sum takes it out. At maxima from 2^20 on that factor
// could overflow; there bfloat16 numbers differ by so much that exp(x - maximum) is 1 or 0 with any
// scale, and with 1 `offset` is exact.
class ExpTerms {
 public:
  ExpTerms() = default;
  // The maximum is finite even if all x are -inf or NaN: so the terms of -inf are 0.
  RNNT_DEVICE explicit ExpTerms(float largest)
      : maximum_(fmaxf(largest, std::numeric_limits<float>::lowest())),
        scale_(fabsf(maximum_) < 0x1p20f ? kLog2E : 1.0f),
        offset_(-maximum_ * scale_) {}

  RNNT_DEVICE float term(float x) const { return approximate_exp2(fmaf(x, scale_, offset_)); }
  // Of the x whose terms have this sum; -inf if all are -inf.
  RNNT_DEVICE float log_sum(float sum) const {
    return maximum_ + (log_of(sum) - kLn2 * fmaf(maximum_, scale_, offset_));
  }

 private:
  float maximum_, scale_, offset_;
};

// held: vectors of a lane, (V + 63) / 64.
template <typename scalar, int held>
class HeldRow {
 public:
  // skipped: a column that counts as -inf, or -1.
  RNNT_DEVICE HeldRow(int32_t V, int32_t skipped, int lane) : lane_column_(lane * kHeldWidth) {
    const int32_t columns_of_last = V - kLast * kRound - lane_column_;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      kept_of_last_[i] = (2 * i < columns_of_last ? 0xffffu : 0u) |
                         (2 * i + 1 < columns_of_last ? 0xffff0000u : 0u);
#pragma unroll
      for (int k = 0; k < held; ++k) pairs_[k][i] = {0};
    }
    // The pair of this lane that contains the skipped column.
    const int32_t at = skipped % kRound - lane_column_;
    if (skipped >= 0 && uint32_t(at) < kHeldWidth)
      skipped_pair_ = skipped / kRound * kPairs + at / 2;
    kept_of_skipped_ = skipped % 2 == 0 ? 0xffff0000u : 0xffffu;
  }

  // `row`: the address of the row's first logit.
  RNNT_DEVICE void load(const scalar* row) {
#pragma unroll
    for (int k = 0; k < held; ++k) load_vector_of(row, k);
  }

  // What the exponentials of all lanes' logits are computed from.
  RNNT_DEVICE ExpTerms terms() {
    hide_columns();
    Pair largest = pairs_[0][0];
#pragma unroll
    for (int k = 0; k < held; ++k) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) largest = larger(largest, pairs_[k][i]);
    }
#pragma unroll
    for (int distance = kSmallGroup / 2; distance > 0; distance /= 2) {
      largest = larger(largest, Pair{__shfl_xor_sync(kAllLanes, largest.bits, distance)});
    }
    return ExpTerms(fmaxf(largest.low(), largest.high()));
  }

  // The sum of all lanes' terms; loads the row at `next` if `loads`.
  RNNT_DEVICE float sum_and_load(const ExpTerms& terms, const scalar* next, bool loads) {
    float low = 0, high = 0;
#pragma unroll
    for (int k = 0; k < held; ++k) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        low += terms.term(pairs_[k][i].low());
        high += terms.term(pairs_[k][i].high());
      }
      if (loads) load_vector_of(next, k);
    }
    return sum_lanes<kSmallGroup>(low + high);
  }

 private:
  using Pair = PackedPair<scalar>;
  static constexpr int kPairs = kHeldWidth / 2, kRound = kSmallGroup * kHeldWidth;
  static constexpr int kLast = held - 1;

  RNNT_DEVICE void load_vector_of(const scalar* row, int k) {
    if (k == kLast && kept_of_last_[0] == 0) return;
    const uint4 word = *reinterpret_cast<const uint4*>(row + k * kRound + lane_column_);
    pairs_[k][0] = {word.x};
    pairs_[k][1] = {word.y};
    pairs_[k][2] = {word.z};
    pairs_[k][3] = {word.w};
  }

  // Makes the columns from V on and the skipped one -inf.
  RNNT_DEVICE void hide_columns() {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) pairs_[kLast][i] = keep(pairs_[kLast][i], kept_of_last_[i]);
    int32_t skipped_pair = skipped_pair_;
    // Compared in every row anew: masks of all pairs would not fit into registers.
    asm volatile("" : "+r"(skipped_pair));
    if (skipped_pair < 0) return;
#pragma unroll
    for (int k = 0; k < held; ++k) {
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const bool here = k * kPairs + i == skipped_pair;
        pairs_[k][i] = here ? keep(pairs_[k][i], kept_of_skipped_) : pairs_[k][i];
      }
    }
  }

  Pair pairs_[held][kPairs];
  uint32_t kept_of_last_[kPairs], kept_of_skipped_;
  int32_t lane_column_, skipped_pair_ = -1;
};

// Calls work(std::integral_constant<int, held>) for rows of V logits.
template <typename Work>
void dispatch_held(int64_t V, Work&& work) {
  constexpr int round = kSmallGroup * kHeldWidth;
  dispatch_value<1, 2, 3, 4, 5, 6, 7, 8>(int((V + round - 1) / round), work);
}

}  // namespace pruned_rnnt::cuda
