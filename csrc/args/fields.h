// Types of the fields of argument groups. Several arguments of an op that belong together are one
// parameter of its host function: a struct whose members are these arguments in the order of the
// schema and whose `Fields` are their types (op.h). In Python they are a named tuple of that name.
#pragma once

#include <tuple>
#include <utility>

#include "view.h"

namespace pruned_rnnt {

template <typename type, size_t>
using Repeated = type;
template <typename type, size_t... i>
std::tuple<Repeated<type, i>...> repeated(std::index_sequence<i...>);

// So many tensors.
template <size_t count>
using Views = decltype(repeated<const View&>(std::make_index_sequence<count>()));
template <size_t count>
using OptionalViews = decltype(repeated<const OptionalView&>(std::make_index_sequence<count>()));

// A group of nothing but so many tensors, by name.
#define PRUNED_RNNT_VIEWS(group, count, ...) \
  struct group {                             \
    using Fields = Views<count>;             \
    View __VA_ARGS__;                        \
  };

}  // namespace pruned_rnnt
