// beam_frames: modified beam search, frame by frame. Contract:
// pruned_rnnt/ops/search/search_frames.py.
//
//     added(b, v) = log p(v | act(am(t) + lm(b)))
//     the B best of score(b) + added(b, v) become the rows (parent b, symbol v)
//     of rows with equal sequences, the first gets the sum of their probabilities
//
// A block keeps the rows of some utterances, and a warp chooses those of one:
//
//     tile            u0 b0 | u0 b1 | u0 b2 | u0 b3 | u1 b0 | u1 b1 | u1 b2 | u1 b3
//     added           (rows, V) in shared memory
//     warp u, lane b  score, hash and length of row b
//
// Axes: N utterances, T frames, B rows of a beam, C symbols of a context, P predictor width,
// D joiner width, V vocabulary.
#include <algorithm>
#include <limits>

#include "contracts/search.h"
#include "cuda/search/search_model.cuh"

namespace pruned_rnnt::cuda {
namespace {

// Knuth's 64-bit LCG multiplier, as in pruned_rnnt/ops/search/beam_rows.py.
constexpr uint64_t kHashMultiplier = 6364136223846793005u;
// One lane for each row.
constexpr int kMostBeam = 32;

// All of a batch; the arrays of the op's contract.
struct Batch {
  const float* am;
  const int64_t* lengths;
  int64_t N, T, begin;
  int32_t B;
  int32_t utterances;  // of a block
  float* score;
  int64_t *hash, *length;
  float* lm;
  int64_t *context, *parent, *symbol;
  float* added;
  int64_t* end;
};

// Shared memory of a block, in elements of four bytes.
struct Layout {
  PRUNED_RNNT_HOST_DEVICE Layout(const DeviceSearchModel& model, int rows)
      : tiles((rows + kTileRows - 1) / kTileRows),
        x(0),
        lm(tiles * model.tile_size()),
        added(lm + 2 * rows * model.D),
        context(added + rows * model.V),
        source(context + 2 * rows * model.C),
        emits(source + rows),
        total(emits + rows) {}

  int tiles;
  // x: rows of tiles, with gaps; lm (2, rows, D), before and after a frame; added (rows, V);
  // context (2, rows, C); source: the row that each row comes from; emits: whether a symbol
  // follows.
  int x, lm, added, context, source, emits, total;
};

// The row of the whole block's log-probabilities after one context, by one warp; x (V) are its
// logits, and become what each symbol adds to the score.
RNNT_DEVICE void to_added(const DeviceSearchModel& model, float* x) {
  const int lane = threadIdx.x % 32;
  ExpSum<float> all;
  for (int v = lane; v < model.V; v += 32) {
    if (!(model.hat && v == model.blank)) all.add({x[v]});
  }
  all.merge_lanes<32>();
  const float log_sum = logf(all.sum);
  const float blank_logit = x[model.blank];
  __syncwarp();
  const float scale = model.hat ? log_sigmoid(-blank_logit) : 0.0f;
  for (int v = lane; v < model.V; v += 32) {
    float added = (x[v] - all.maximum) - log_sum;
    if (model.hat) added = v == model.blank ? log_sigmoid(blank_logit) : added + scale;
    x[v] = model.silent[v] ? minus_infinity<float>() : added;
  }
}

// An extension of a row of one utterance: row * V + symbol, and its score. As in torch's topk, NaN
// is above all numbers, so that it is seen in the result; of equal scores the first is above.
struct Extension {
  float score = minus_infinity<float>();
  int32_t place = std::numeric_limits<int32_t>::max();

  RNNT_DEVICE bool is_above(const Extension& other) const {
    const bool is_nan = isnan(score), other_is_nan = isnan(other.score);
    if (score == other.score || (is_nan && other_is_nan)) return place < other.place;
    return score > other.score || is_nan;
  }
};

// The two best extensions among this lane's symbols that were not taken.
struct BestOfLane {
  Extension first, second;
};

// added (B,V) has -inf for those that are taken.
RNNT_DEVICE BestOfLane best_of_lane(const DeviceSearchModel& model, const float* added, int B,
                                    float score) {
  BestOfLane best;
  for (int b = 0; b < B; ++b) {
    const float before = __shfl_sync(kAllLanes, score, b);
    if (before == minus_infinity<float>()) continue;
    for (int v = threadIdx.x % 32; v < model.V; v += 32) {
      const float x = added[b * model.V + v];
      if (x == minus_infinity<float>()) continue;
      const Extension next{before + x, b * model.V + v};
      if (next.is_above(best.first)) {
        best = {next, best.first};
      } else if (next.is_above(best.second)) {
        best.second = next;
      }
    }
  }
  return best;
}

RNNT_DEVICE Extension best_of_warp(Extension best) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    const Extension other{__shfl_xor_sync(kAllLanes, best.score, distance),
                          __shfl_xor_sync(kAllLanes, best.place, distance)};
    if (other.is_above(best)) best = other;
  }
  return best;
}

// Lane b: what becomes row b, and the row before the frame that it comes from.
struct Step {
  int32_t parent, symbol;  // symbol: maybe blank
  float score, added;
};

// The B best extensions of the rows of an utterance, by one warp; overwrites added (B,V).
RNNT_DEVICE Step extend(const DeviceSearchModel& model, float* added, int B, float score) {
  const int lane = threadIdx.x % 32;
  Step step{lane, model.blank, minus_infinity<float>(), 0.0f};
  BestOfLane own = best_of_lane(model, added, B, score);
  int taken = 0;
  for (int b = 0; b < B; ++b) {
    const Extension best = best_of_warp(own.first);
    if (best.score == minus_infinity<float>()) break;
    const int32_t parent = best.place / model.V;
    if (lane == b) step = {parent, best.place - parent * model.V, best.score, added[best.place]};
    __syncwarp();
    if (best.place == own.first.place) {
      added[best.place] = minus_infinity<float>();
      own = {own.second, {}};
      ++taken;
    }
    __syncwarp();
    if (__any_sync(kAllLanes, taken == 2)) {
      own = best_of_lane(model, added, B, score);
      taken = 0;
    }
  }
  return step;
}

// Moves the summed probability of equal sequences to the first of them.
RNNT_DEVICE float merged_score(float score, uint64_t hash, int B) {
  const int lane = threadIdx.x % 32;
  const bool is_live = lane < B && score != minus_infinity<float>();
  const uint32_t live = __ballot_sync(kAllLanes, is_live);
  uint32_t same = __match_any_sync(kAllLanes, hash) & live;
  if (!is_live) same = 0;
  if (!__any_sync(kAllLanes, __popc(same) > 1)) return score;
  const int first = __ffs(same) - 1;
  float sum = 0;
  for (int b = 0; b < B; ++b) {
    const float other = __shfl_sync(kAllLanes, score, b);
    if (same >> b & 1) sum += b == lane ? 1.0f : expf(other - score);
  }
  if (!is_live || __popc(same) == 1) return score;
  return lane == first ? score + logf(sum) : minus_infinity<float>();
}

template <int width>
__global__ void __launch_bounds__(kSearchThreads, 1)
    beam_frames_kernel(DeviceSearchModel model, Batch batch) {
  const int B = batch.B, C = model.C, P = model.P, D = model.D, V = model.V;
  const int hidden_stride = tile_stride(D), predicted_stride = tile_stride(P);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = int64_t(blockIdx.x) * batch.utterances;
  const int count = int(min(int64_t(batch.utterances), batch.N - first));
  const int rows = count * B;
  const Layout layout(model, batch.utterances * B);
  float* const memory = dynamic_shared_memory<float>();
  int32_t* const integers = reinterpret_cast<int32_t*>(memory);
  float* const x = memory + layout.x;
  float* const added = memory + layout.added;
  int32_t *const source = integers + layout.source, *const emits = integers + layout.emits;
  float *lm = memory + layout.lm, *next_lm = lm + batch.utterances * B * D;
  int32_t *context = integers + layout.context, *next_context = context + batch.utterances * B * C;

  for (int i = threadIdx.x; i < rows * D; i += kSearchThreads) lm[i] = batch.lm[first * B * D + i];
  for (int i = threadIdx.x; i < rows * C; i += kSearchThreads) {
    context[i] = int32_t(batch.context[first * B * C + i]);
  }
  // The row of this lane.
  const int64_t n = first + warp;
  const bool has_row = warp < count && lane < B;
  const int64_t own = n * B + lane;
  float score = has_row ? batch.score[own] : minus_infinity<float>();
  uint64_t hash = has_row ? uint64_t(batch.hash[own]) : 0;
  int64_t length = has_row ? batch.length[own] : 0;
  const int64_t frames = warp < count ? min(batch.lengths[n], batch.T) : 0;
  __syncthreads();

  for (int64_t t = batch.begin; t < batch.T; ++t) {
    for (int d = threadIdx.x; d < D; d += kSearchThreads) {
#pragma unroll 2
      for (int u = 0; u < count; ++u) {
        const int64_t frame = (first + u) * batch.T + t;
        const float am = __ldg(batch.am + frame * D + d);
        if (t + 1 < batch.T) prefetch(batch.am + (frame + 1) * D + d);
        for (int b = 0; b < B; ++b) {
          const int row = u * B + b;
          x[row * hidden_stride + d] = model.hidden(am, lm[row * D + d]);
        }
      }
    }
    __syncthreads();
    for (int tile = 0; tile < layout.tiles; ++tile) {
      tile_product<width>(x + tile * kTileRows * hidden_stride, hidden_stride, model.output_weight,
                          model.output_bias, D, V, [&](int, int r, int v, float logit) {
                            const int row = tile * kTileRows + r;
                            if (row < rows) added[row * V + v] = logit;
                          });
    }
    __syncthreads();
    for (int r = warp; r < rows; r += kSearchWarps) to_added(model, added + r * V);
    __syncthreads();

    bool changes = false, has_new = false;
    if (warp < count) {
      Step step{lane, model.blank, score, 0.0f};
      if (t < frames) step = extend(model, added + warp * B * V, B, score);
      const bool is_new = step.symbol != model.blank;
      const uint64_t hash_before = __shfl_sync(kAllLanes, hash, step.parent);
      const int64_t length_before = __shfl_sync(kAllLanes, length, step.parent);
      if (t < frames) {
        hash = is_new ? hash_before * kHashMultiplier + uint64_t(step.symbol) + 1 : hash_before;
        length = length_before + is_new;
        score = merged_score(step.score, hash, B);
      }
      if (has_row) {
        const int64_t place = (n * batch.T + t) * B + lane;
        batch.parent[place] = step.parent;
        batch.symbol[place] = is_new ? step.symbol : -1;
        batch.added[place] = step.added;
        const int row = warp * B + lane, before = warp * B + step.parent;
        source[row] = before;
        emits[row] = is_new;
        for (int c = 0; c + 1 < C; ++c) {
          next_context[row * C + c] = context[before * C + c + is_new];
        }
        next_context[row * C + C - 1] = is_new ? step.symbol : context[before * C + C - 1];
        has_new = is_new;
        changes = is_new || step.parent != lane;
      }
    }
    // Without a change, both contexts are equal.
    if (!__syncthreads_or(changes)) continue;
    const bool projects = __syncthreads_or(has_new);
    for (int r = 0; r < rows; ++r) {
      if (emits[r]) {
        for (int p = threadIdx.x; p < P; p += kSearchThreads) {
          x[r * predicted_stride + p] = model.predicted(next_context + r * C, p);
        }
      } else {
        for (int d = threadIdx.x; d < D; d += kSearchThreads) {
          next_lm[r * D + d] = lm[source[r] * D + d];
        }
      }
    }
    if (projects) {
      __syncthreads();
      for (int tile = 0; tile < layout.tiles; ++tile) {
        tile_product<width>(x + tile * kTileRows * predicted_stride, predicted_stride,
                            model.decoder_weight, model.decoder_bias, P, D,
                            [&](int, int r, int d, float projected) {
                              const int row = tile * kTileRows + r;
                              if (row < rows && emits[row]) next_lm[row * D + d] = projected;
                            });
      }
    }
    __syncthreads();
    float* const last_lm = lm;
    lm = next_lm;
    next_lm = last_lm;
    int32_t* const last_context = context;
    context = next_context;
    next_context = last_context;
  }

  for (int i = threadIdx.x; i < rows * D; i += kSearchThreads) batch.lm[first * B * D + i] = lm[i];
  for (int i = threadIdx.x; i < rows * C; i += kSearchThreads) {
    batch.context[first * B * C + i] = context[i];
  }
  if (has_row) {
    batch.score[own] = score;
    batch.hash[own] = int64_t(hash);
    batch.length[own] = length;
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *batch.end = batch.T;
}

void beam_frames(const Launcher& launch, const View& am, const View& lengths, int64_t begin,
                 const OptionalView& fusion, const SearchModelArguments& arguments,
                 const BeamState& state, const BeamSteps& steps, const View& end) {
  const int64_t N = am.size(0), B = state.score.size(1);
  STD_TORCH_CHECK(!fusion.has_value() && B <= kMostBeam,
                  "pruned_rnnt::beam_frames: on a GPU, `fusion` "
                  "must be None and `score` have at most ",
                  kMostBeam, " rows, got ", B);
  const DeviceSearchModel model(arguments);
  STD_TORCH_CHECK(B * model.V <= std::numeric_limits<int32_t>::max() / 8,
                  "pruned_rnnt::beam_frames: B V must fit 28 bits");
  const auto bytes = [&](int64_t utterances) {
    return size_t(Layout(model, int(utterances * B)).total) * sizeof(float);
  };
  const int64_t utterances = utterances_a_block(launch, "beam_frames", N, kTileRows / B, bytes);
  const Batch batch{data_of<float>(am),
                    data_of<int64_t>(lengths),
                    N,
                    am.size(1),
                    begin,
                    int32_t(B),
                    int32_t(utterances),
                    mutable_data_of<float>(state.score),
                    mutable_data_of<int64_t>(state.hash),
                    mutable_data_of<int64_t>(state.length),
                    mutable_data_of<float>(state.lm),
                    mutable_data_of<int64_t>(state.context),
                    mutable_data_of<int64_t>(steps.parent),
                    mutable_data_of<int64_t>(steps.symbol),
                    mutable_data_of<float>(steps.added),
                    mutable_data_of<int64_t>(end)};
  const auto blocks = uint32_t(std::max<int64_t>(1, (N + utterances - 1) / utterances));
  dispatch_width<float>(model.vector_width(), [&](auto width) {
    launch(beam_frames_kernel<decltype(width)::value>, blocks, kSearchThreads, bytes(utterances),
           model, batch);
  });
}

}  // namespace

PRUNED_RNNT_CUDA_OP(beam_frames)

}  // namespace pruned_rnnt::cuda
