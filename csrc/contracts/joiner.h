// Contracts of the ops of joiners and their output layers that have CUDA kernels only,
// pruned_rnnt/ops/joiner and matrix_products.py and autograd.py in pruned_rnnt/ops/common.
//
// Axes: N utterances, T frames, U symbols, R rows, D joiner dimension, V vocabulary, V' with the
// padding of the products, K chunks.
#pragma once

#include "args/joiner.h"
#include "contracts/rows.h"

namespace pruned_rnnt::contracts {

// am, lm, weight, bias, targets, the geometry of the rows and the options of the ops.
struct JoinerSizes {
  void read(Arguments& in, Type layer = Type::kScalar) {
    in.tensor("am", Type::kScalar, {N, T, D}, Layout::kPitched);
    in.tensor("lm", Type::kScalar, {N, L, D}, Layout::kPitched);
    in.tensor("weight", layer, {padded_V, D});
    in.tensor("bias", layer, {padded_V});
    in.tensor("targets", Type::kInt32, {N, U});
    rows.emplace(in, N);
    in.require(rows->T.value() <= T.value(), "`am` must have all `frames`");
    offsets = &in.numbers("chunk_offsets");
    bool ordered = !offsets->empty() && offsets->front() >= 0;
    for (size_t i = 1; i < offsets->size(); ++i) {
      ordered &= (*offsets)[i] >= (*offsets)[i - 1];
      largest = std::max(largest, (*offsets)[i] - (*offsets)[i - 1]);
    }
    in.require(ordered, "`chunk_offsets` must not decrease, from 0 on");
    in.number("hidden_rows", 0, kMostInt64);
    vocabulary = in.number("vocabulary", 1, padded_V.value());
    in.number("activation", 0, kMostActivation);
    in.number("blank", 0, vocabulary - 1);
    in.number("normalization", 0, kMostLogitMode);
    topology(in);
  }
  int64_t end() const { return offsets->back(); }

  Size N{"N"}, T{"T"}, L{"U + 1"}, D{"D"}, padded_V{"V'"}, U{"U"};
  std::optional<LatticeRows> rows;
  const std::vector<int64_t>* offsets = nullptr;
  int64_t largest = 0, vocabulary = 0;
};

inline void fused_log_probs(Arguments& in) {
  JoinerSizes sizes;
  Size C{"rows of a chunk", kMostInt64}, R{"R", kMostInt64}, K{"K"};
  sizes.read(in);
  in.tensor("hidden", Type::kScalar, {C, sizes.D});
  in.tensor("logits", Type::kScalar, {C, sizes.padded_V});
  for (const char* name : {"px", "py", "lse"}) in.flat(name, Type::kReal, R);
  const View* durations = in.optional("duration_logits", Type::kReal, {R, K});
  in.require(sizes.largest <= C.value(), "`hidden` must have room for the largest chunk");
  in.require(sizes.end() <= R.value(), "`px` must have an element for each row");
  sizes.rows->require_inside(in, 0, R);
  in.require(durations == nullptr || sizes.vocabulary + K.value() <= sizes.padded_V.value(),
             "`weight` must have rows for the durations behind the vocabulary");
}

inline void packed_log_probs(Arguments& in) {
  JoinerSizes sizes;
  Size C{"rows of a chunk"}, R{"R"};
  sizes.read(in, Type::kBFloat16);
  in.tensor("hidden", Type::kBFloat16, {C, sizes.D + kBiasColumns});
  for (const char* name : {"px", "py", "lse"}) in.tensor(name, Type::kReal, {R});
  in.require(C.value() > 0, "`hidden` must have a row");
}

inline void fitting_splits(Arguments& in) {
  Size N{"N"};
  in.tensor("logit_lengths", Type::kInt32, {N});
  in.tensor("target_lengths", Type::kInt32, {N});
  in.number("frames", -1, kMostInt32);
  in.number("columns", -1, kMostInt32);
  in.tensor("row_splits", Type::kInt64, {N + 1});
}

// weight and bias of one type, the results of bfloat16.
inline void output_layer(Arguments& in) {
  Size V{"V"}, padded_V{"V'"}, D{"D"};
  in.tensor("weight", Type::kScalar, {V, D});
  in.tensor("bias", Type::kScalar, {V});
  in.tensor("padded_weight", Type::kBFloat16, {padded_V, D});
  in.tensor("padded_bias", Type::kBFloat16, {padded_V});
  in.require(padded_V.value() >= V.value(), "`padded_weight` must have all rows of `weight`");
}

// listed, places, begins, chunk_utterances and chunk_frames.
inline void active_lists(Arguments& in, Size& R, Size& chunks) {
  in.tensor("listed", Type::kInt32, {R});
  in.tensor("places", Type::kInt32, {R + 1});
  for (const char* name : {"begins", "chunk_utterances", "chunk_frames"}) {
    in.tensor(name, Type::kInt32, {chunks + 1});
  }
}
inline void chunk(Arguments& in, const Size& chunks) { in.number("chunk", 0, chunks.value() - 1); }

inline void list_active_rows(Arguments& in) {
  Size N{"N"}, R{"R"}, chunks{"chunks"}, parts{"parts"};
  in.flat("gx", Type::kFloat32, R);
  in.flat("gy", Type::kFloat32, R);
  in.tensor("total", Type::kFloat32, {N});
  LatticeRows rows(in, N);
  rows.require_inside(in, 0, R);
  const int64_t chunk_rows = in.number("chunk_rows", 1, kMostInt32);
  in.tensor("limits", Type::kFloat32, {N, rows.T.value() + rows.S.value()});
  in.tensor("found", Type::kInt32, {(R.value() + kListedRows - 1) / kListedRows, kListedWords});
  active_lists(in, R, chunks);
  in.tensor("block_ends", Type::kInt32, {chunks, parts});
  in.require(chunks.value() == (R.value() + chunk_rows - 1) / chunk_rows,
             "`block_ends` must have a row for each chunk of `chunk_rows` rows");
}

inline void active_joiner_rows(Arguments& in) {
  Size N{"N"}, T{"T"}, L{"U + 1"}, D{"D"}, R{"R"}, chunks{"chunks"}, C{"rows of a chunk"};
  Size columns{"D'"};
  in.tensor("am", Type::kBFloat16, {N, T, D}, Layout::kPitched);
  in.tensor("lm", Type::kBFloat16, {N, L, D}, Layout::kPitched);
  const LatticeRows rows(in, N);
  in.require(rows.T.value() <= T.value(), "`am` must have all `frames`");
  active_lists(in, R, chunks);
  chunk(in, chunks);
  in.number("activation", 0, kMostActivation);
  in.tensor("hidden", Type::kBFloat16, {C, columns}, Layout::kRows);
  in.require(columns.value() > D.value(), "`hidden` must have a column for the bias behind D");
}

inline void active_log_probs_backward(Arguments& in) {
  Size N{"N"}, U{"U"}, R{"R"}, chunks{"chunks"}, C{"rows of a chunk"}, columns{"V'"}, parts{"P"};
  in.tensor("grad_loss", Type::kFloat32, {N});
  for (const char* name : {"lse", "gx", "gy"}) in.flat(name, Type::kFloat32, R);
  in.tensor("targets", Type::kInt32, {N, U});
  const LatticeRows rows(in, N);
  active_lists(in, R, chunks);
  chunk(in, chunks);
  const int64_t vocabulary = in.number("vocabulary", 1, kMostInt32);
  in.number("blank", 0, vocabulary - 1);
  in.number("normalization", 0, kMostLogitMode);
  in.tensor("logits", Type::kBFloat16, {C, columns}, Layout::kRows);
  in.tensor("sums", Type::kFloat32, {parts, columns});
  in.require(vocabulary <= columns.value(), "`logits` must have columns for the vocabulary");
}

inline void active_joiner_rows_backward(Arguments& in) {
  Size N{"N"}, T{"T"}, L{"U + 1"}, D{"D"}, R{"R"}, chunks{"chunks"}, C{"rows of a chunk"};
  Size columns{"D'"};
  in.tensor("grad_hidden", Type::kBFloat16, {C, D}, Layout::kRows);
  in.tensor("hidden", Type::kBFloat16, {C, columns}, Layout::kRows);
  const LatticeRows rows(in, N);
  active_lists(in, R, chunks);
  chunk(in, chunks);
  in.number("activation", 0, kMostActivation);
  in.tensor("grad_am", Type::kBFloat16, {N, T, D}, Layout::kPitched);
  in.tensor("grad_lm", Type::kFloat32, {N, L, D});
  in.require(rows.T.value() <= T.value(), "`grad_am` must have all `frames`");
  in.require(columns.value() >= D.value(), "`hidden` must have D columns");
}

inline void active_gradients(Arguments& in) {
  JoinerSizes sizes;
  Size R{"R"};
  in.tensor("grad_loss", Type::kFloat32, {sizes.N});
  sizes.read(in, Type::kBFloat16);
  for (const char* name : {"lse", "gx", "gy"}) in.flat(name, Type::kFloat32, R);
  in.tensor("total", Type::kFloat32, {sizes.N});
  sizes.rows->require_inside(in, 0, R);
  in.number("chunk_rows", 1, kMostInt32);
  in.number("blocks", 1, kMostInt32);
  in.number("bias_parts", 1, kMostInt32);
  in.tensor("grad_am", Type::kScalar, {sizes.N, sizes.T, sizes.D});
  in.tensor("grad_lm", Type::kScalar, {sizes.N, sizes.L, sizes.D});
  in.optional("grad_weight", Type::kScalarOrReal, {sizes.padded_V, sizes.D});
  in.optional("grad_bias", Type::kScalarOrReal, {sizes.padded_V});
}

inline void counted_rows_product(Arguments& in) {
  Size R{"R"}, k{"k"}, n{"n"};
  in.tensor("a", Type::kFloat32, {R, k}, Layout::kRows);
  in.tensor("b", Type::kFloat32, {k, n}, Layout::kLines);
  in.optional("bias", Type::kFloat32, {n});
  in.flat("total", Type::kInt64, 1);
  in.number("begin", 0, kMostInt64 / 2);
  in.tensor("out", Type::kFloat32, {R, n}, Layout::kRows);
}

inline void counted_rows_sums(Arguments& in) {
  Size R{"R"}, m{"m"}, n{"n"}, G{"G"};
  in.tensor("a", Type::kFloat32, {R, m}, Layout::kRows);
  in.tensor("b", Type::kFloat32, {R, n}, Layout::kRows);
  in.flat("total", Type::kInt64, 1);
  in.number("begin", 0, kMostInt64 / 2);
  in.tensor("out", Type::kFloat32, {G, m, n});
}

// results: shaped like the sources, which are optional; factors: () or (N) for tensors (N,...).
inline void scale(Arguments& in) {
  Size N{"N"};
  const std::vector<Tensor>* sources = in.tensors("sources");
  const View& factors = in.flat("factors", Type::kReal, N);
  const std::vector<Tensor>& results = *in.tensors("results");
  in.require(sources == nullptr || sources->size() == results.size(),
             "there must be a source for each result");
  for (size_t i = 0; i < results.size(); ++i) {
    const View result(results[i]), source(sources != nullptr ? (*sources)[i] : results[i]);
    Size elements{"elements of results", kMostInt64};
    in.check_flat(result, "results", Type::kAnyScalar, elements);
    in.check_flat(source, "sources", Type::kAnyScalar, elements);
    in.require(source.scalar_type() == result.scalar_type() &&
                   factors.scalar_type() == accumulator_of(result.scalar_type()),
               "`results` must have the dtypes of `sources`, and `factors` their accumulator's");
    in.require(factors.dim() == 0 || (result.dim() > 0 && result.size(0) == N.value()),
               "`results` must have a first dimension of N");
  }
}

}  // namespace pruned_rnnt::contracts
