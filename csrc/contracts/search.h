// Contracts of the searches, pruned_rnnt/ops/search.
//
// Axes: N batch, T frames, B rows of a beam, C symbols of a context, P predictor width, D joiner
// width, V vocabulary.
#pragma once

#include "arguments.h"

namespace pruned_rnnt::contracts {

struct SearchSizes {
  Size N{"N"}, T{"T"}, C{"C"}, P{"P"}, D{"D"}, V{"V"};

  // am and lengths.
  void frames(Arguments& in) {
    in.tensor("am", Type::kFloat32, {N, T, D});
    in.tensor("lengths", Type::kInt64, {N});
  }
  void model(Arguments& in) {
    in.tensor("tables", Type::kFloat32, {C, V + 1, P});
    in.tensor("decoder_weight", Type::kFloat32, {D, P});
    in.tensor("decoder_bias", Type::kFloat32, {D});
    in.tensor("output_weight", Type::kFloat32, {V, D});
    in.tensor("output_bias", Type::kFloat32, {V});
    in.tensor("silent", Type::kBool, {V});
    in.number("blank", 0, V.value() - 1);
    in.number("activation", 0, 2);
    in.require(C.value() > 0, "`tables` must have a place");
  }
  // Kernels look the symbols up in the tables; those on a GPU take others for no symbol.
  void context(Arguments& in, Shape shape) {
    const View& context = in.tensor("context", Type::kInt64, shape);
    if (!in.on_cpu()) return;
    const int64_t* const symbols = data_of<int64_t>(context);
    bool inside = true;
    for (int64_t i = 0; i < context.numel(); ++i) inside &= symbols[i] < V.value();
    in.require(inside, "`context` must have symbols below V");
  }
};

inline void greedy_frames(Arguments& in) {
  SearchSizes sizes;
  auto& [N, T, C, P, D, V] = sizes;
  Size most{"symbols of a frame"};
  sizes.frames(in);
  sizes.model(in);
  in.tensor("lm", Type::kFloat32, {N, D});
  sizes.context(in, {N, C});
  in.tensor("symbols", Type::kInt64, {N, T, most});
  in.tensor("scores", Type::kFloat32, {N, T, most});
}

inline void beam_frames(Arguments& in) {
  SearchSizes sizes;
  auto& [N, T, C, P, D, V] = sizes;
  Size B{"B"};
  sizes.frames(in);
  in.number("begin", 0, T.value());
  in.optional("fusion", Type::kFloat32, {N, B, V});
  sizes.model(in);
  in.tensor("score", Type::kFloat32, {N, B});
  in.tensor("hash", Type::kInt64, {N, B});
  in.tensor("length", Type::kInt64, {N, B});
  in.tensor("lm", Type::kFloat32, {N, B, D});
  sizes.context(in, {N, B, C});
  in.tensor("parent", Type::kInt64, {N, T, B});
  in.tensor("symbol", Type::kInt64, {N, T, B});
  in.tensor("added", Type::kFloat32, {N, T, B});
  in.tensor("end", Type::kInt64, {1});
  in.require(B.value() > 0, "`score` must have a row");
}

}  // namespace pruned_rnnt::contracts
