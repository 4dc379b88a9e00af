// greedy_frames: greedy search. Contract: pruned_rnnt/ops/search/search_frames.py.
//
//     frame f, at most M times:  v = argmax log p(v | act(am(f) + lm));  blank or silent v: f + 1
//
// Until the next symbol the predictor's output does not change, so a step computes the next frames
// of each utterance, and drops those after a symbol:
//
//     rows of the tile     u0 f | u0 f+1 | u0 f+2 | u0 f+3 | u1 g | u1 g+1 | u1 g+2 | u1 g+3
//                          one utterance left: its next eight frames
//
// Axes: N utterances, T frames, M symbols of a frame, C symbols of a context, P predictor width,
// D joiner width, V vocabulary.
#include <algorithm>

#include "contracts/search.h"
#include "cuda/search/search_model.cuh"

namespace pruned_rnnt::cuda {
namespace {

// All of a batch; the arrays of the op's contract.
struct Batch {
  const float* am;
  const int64_t* lengths;
  int64_t N, T;
  int32_t M;
  int32_t utterances;  // of a block
  float* lm;
  int64_t *context, *symbols;
  float* scores;
};

// `Best` in shared memory, whose variables have no initial values.
struct StoredBest {
  float maximum, sum;
  int32_t symbol;
};

// The most probable of some symbols: the sum of all exponentials, relative to its own.
struct Best {
  ExpSum<float> all;
  int32_t symbol = -1;

  RNNT_DEVICE void offer(int32_t v, float x) {
    if (symbol < 0 || x > all.maximum) symbol = v;
    all.add({x});
  }

  RNNT_DEVICE void merge(const StoredBest& other) {
    if (other.symbol < 0) return;
    const bool is_first =
        other.maximum > all.maximum || (other.maximum == all.maximum && other.symbol < symbol);
    if (symbol < 0 || is_first) symbol = other.symbol;
    all.merge(other.maximum, other.sum);
  }

  // Of all lanes whose number has the same remainder.
  template <int divisor>
  RNNT_DEVICE void merge_lanes() {
#pragma unroll
    for (int bit = divisor; bit < 32; bit *= 2) {
      merge({__shfl_xor_sync(kAllLanes, all.maximum, bit), __shfl_xor_sync(kAllLanes, all.sum, bit),
             __shfl_xor_sync(kAllLanes, symbol, bit)});
    }
  }
};

struct Choice {
  int32_t symbol;
  float score;
};

// The most probable symbol or blank and its log-probability, or a NaN. With HAT, `best` is that of
// the symbols other than blank.
RNNT_DEVICE Choice choice_of(const DeviceSearchModel& model, const Best& best, float blank_logit) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const float log_sum = logf(best.all.sum);
  if (!model.hat) return isfinite(log_sum) ? Choice{best.symbol, 0.0f - log_sum} : Choice{0, nan};
  const Choice silence{model.blank, log_sigmoid(blank_logit)};
  if (model.V == 1) return silence;
  if (isnan(silence.score)) return {0, nan};
  if (!isfinite(log_sum)) return {model.blank == 0 ? 1 : 0, nan};
  const Choice symbol{best.symbol, log_sigmoid(-blank_logit) - log_sum};
  if (symbol.score == silence.score) return symbol.symbol < model.blank ? symbol : silence;
  return symbol.score > silence.score ? symbol : silence;
}

// Where the search of an utterance is: its frame, and the symbols emitted in this frame. Those of a
// block are in the lanes of its first warp.
struct Path {
  int64_t n;
  int32_t frame, end, count;
  int32_t first_row, rows;  // of the tile
};

struct Shared {
  int32_t utterance[kTileRows], frame[kTileRows];  // of the rows; utterance -1: none
  int32_t emitted[kTileRows];                      // by each utterance in this step; -1: none
  bool emits, ends;
  float blank_logit[kTileRows];
  Choice choice[kTileRows];
  StoredBest best[kSearchWarps][kTileRows];
};

// Gives the next frames of the paths that have any to the rows.
RNNT_DEVICE void plan(Path* path, Shared* shared) {
  const int lane = threadIdx.x;
  const uint32_t active = __ballot_sync(kAllLanes, path->frame < path->end);
  if (lane < kTileRows) shared->utterance[lane] = -1;
  __syncwarp();
  if (lane == 0) shared->ends = active == 0;
  if (!(active >> lane & 1)) {
    path->rows = 0;
    return;
  }
  const int span = kTileRows / __popc(active);
  path->first_row = span * __popc(active & ((1u << lane) - 1));
  path->rows = min(span, path->end - path->frame);
  for (int i = 0; i < path->rows; ++i) {
    shared->utterance[path->first_row + i] = lane;
    shared->frame[path->first_row + i] = path->frame + i;
  }
}

// A path through its rows, until its next symbol; returns that, or -1.
RNNT_DEVICE int32_t follow(const DeviceSearchModel& model, const Batch& batch, const Shared& shared,
                           Path* path) {
  for (int i = 0; i < path->rows; ++i) {
    const Choice choice = shared.choice[path->first_row + i];
    const bool emits = choice.symbol != model.blank && !model.silent[choice.symbol];
    const int64_t place = (path->n * batch.T + path->frame) * batch.M + path->count;
    batch.scores[place] = choice.score;
    if (emits) {
      batch.symbols[place] = choice.symbol;
      ++path->count;
    }
    if (!emits || path->count == batch.M) {
      ++path->frame;
      path->count = 0;
    }
    if (emits) return choice.symbol;
  }
  return -1;
}

template <int width>
__global__ void __launch_bounds__(kSearchThreads, 1)
    greedy_frames_kernel(DeviceSearchModel model, Batch batch) {
  __shared__ Shared shared;
  const int C = model.C, P = model.P, D = model.D;
  const int hidden_stride = tile_stride(D), predicted_stride = tile_stride(P);
  float* const x = dynamic_shared_memory<float>();  // (kTileRows, D), or (.., P)
  float* const lm = x + model.tile_size();          // (utterances, D)
  int32_t* const context = reinterpret_cast<int32_t*>(lm + batch.utterances * D);  // (.., C)
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t first = int64_t(blockIdx.x) * batch.utterances;
  const int count = int(min(int64_t(batch.utterances), batch.N - first));

  const int64_t places = batch.T * batch.M;
  for (int64_t i = threadIdx.x; i < count * places; i += kSearchThreads) {
    batch.symbols[first * places + i] = -1;
    batch.scores[first * places + i] = 0;
  }
  for (int i = threadIdx.x; i < count * D; i += kSearchThreads) lm[i] = batch.lm[first * D + i];
  for (int i = threadIdx.x; i < count * C; i += kSearchThreads) {
    context[i] = int32_t(batch.context[first * C + i]);
  }
  Path path{first + lane, 0, 0, 0, 0, 0};
  if (warp == 0) {
    if (lane < count) path.end = int32_t(min(batch.lengths[path.n], batch.T));
    plan(&path, &shared);
  }
  __syncthreads();

  while (!shared.ends) {
    for (int d = threadIdx.x; d < D; d += kSearchThreads) {
      float am[kTileRows];
#pragma unroll
      for (int r = 0; r < kTileRows; ++r) {
        const int u = shared.utterance[r];
        const int64_t row = (first + max(u, 0)) * batch.T + (u < 0 ? 0 : shared.frame[r]);
        am[r] = __ldg(batch.am + row * D + d);
        if (u >= 0 && shared.frame[r] + kTileRows < batch.T) {
          prefetch(batch.am + (row + kTileRows) * D + d);
        }
      }
#pragma unroll
      for (int r = 0; r < kTileRows; ++r) {
        const int u = shared.utterance[r];
        if (u >= 0) x[r * hidden_stride + d] = model.hidden(am[r], lm[u * D + d]);
      }
    }
    __syncthreads();

    Best best[kLaneRows];
    tile_product<width>(x, hidden_stride, model.output_weight, model.output_bias, D, model.V,
                        [&](int part, int r, int v, float logit) {
                          if (v == model.blank) shared.blank_logit[r] = logit;
                          if (v != model.blank || !model.hat) best[part].offer(v, logit);
                        });
#pragma unroll
    for (int part = 0; part < kLaneRows; ++part) {
      best[part].merge_lanes<4>();
      if (lane < 4) {
        const Best& own = best[part];
        shared.best[warp][lane * kLaneRows + part] = {own.all.maximum, own.all.sum, own.symbol};
      }
    }
    __syncthreads();

    if (warp == 0) {
      const int r = lane % kTileRows, group = lane / kTileRows;
      Best of_row;
      for (int other = group; other < kSearchWarps; other += 32 / kTileRows) {
        of_row.merge(shared.best[other][r]);
      }
      of_row.merge_lanes<kTileRows>();
      if (group == 0) shared.choice[r] = choice_of(model, of_row, shared.blank_logit[r]);
      __syncwarp();
      const int32_t symbol = follow(model, batch, shared, &path);
      if (symbol >= 0) {
        for (int c = 1; c < C; ++c) context[lane * C + c - 1] = context[lane * C + c];
        context[lane * C + C - 1] = symbol;
      }
      if (lane < kTileRows) shared.emitted[lane] = symbol;
      const bool emits = __any_sync(kAllLanes, symbol >= 0);
      if (lane == 0) shared.emits = emits;
      plan(&path, &shared);
    }
    __syncthreads();

    if (!shared.emits) continue;
    for (int u = 0; u < count; ++u) {
      if (shared.emitted[u] < 0) continue;
      for (int p = threadIdx.x; p < P; p += kSearchThreads) {
        x[u * predicted_stride + p] = model.predicted(context + u * C, p);
      }
    }
    __syncthreads();
    tile_product<width>(x, predicted_stride, model.decoder_weight, model.decoder_bias, P, D,
                        [&](int, int u, int d, float projected) {
                          if (u < count && shared.emitted[u] >= 0) lm[u * D + d] = projected;
                        });
    __syncthreads();
  }

  for (int i = threadIdx.x; i < count * D; i += kSearchThreads) batch.lm[first * D + i] = lm[i];
  for (int i = threadIdx.x; i < count * C; i += kSearchThreads) {
    batch.context[first * C + i] = context[i];
  }
}

void greedy_frames(const Launcher& launch, const View& am, const View& lengths,
                   const SearchModelArguments& arguments, const PredictorState& state,
                   const View& symbols, const View& scores) {
  if (am.size(0) == 0) return;
  const DeviceSearchModel model(arguments);
  const auto bytes = [&](int64_t utterances) {
    return sizeof(float) * (model.tile_size() + utterances * (model.D + model.C));
  };
  const int64_t utterances =
      utterances_a_block(launch, "greedy_frames", am.size(0), kTileRows, bytes);
  const Batch batch{data_of<float>(am),
                    data_of<int64_t>(lengths),
                    am.size(0),
                    am.size(1),
                    int32_t(symbols.size(2)),
                    int32_t(utterances),
                    mutable_data_of<float>(state.lm),
                    mutable_data_of<int64_t>(state.context),
                    mutable_data_of<int64_t>(symbols),
                    mutable_data_of<float>(scores)};
  const auto blocks = uint32_t((batch.N + utterances - 1) / utterances);
  dispatch_width<float>(model.vector_width(), [&](auto width) {
    launch(greedy_frames_kernel<decltype(width)::value>, blocks, kSearchThreads, bytes(utterances),
           model, batch);
  });
}

}  // namespace

PRUNED_RNNT_CUDA_OP(greedy_frames)

}  // namespace pruned_rnnt::cuda
