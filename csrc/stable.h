// The one door to PyTorch's stable ABI: every source file includes this header and no other header
// of torch. What is named here exists from torch 2.11 on (TORCH_TARGET_VERSION, CMakeLists.txt).
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>
#include <optional>
#include <type_traits>

namespace pruned_rnnt {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

// The type that sums and recursions over inputs of type `scalar` are carried in.
template <typename scalar>
using acc_type = std::conditional_t<std::is_same_v<scalar, double>, double, float>;

// Of the types the ops take: the floating-point ones, int32 and int64.
inline int64_t element_bytes(ScalarType type) {
  return type == ScalarType::Double || type == ScalarType::Long ? 8
         : type == ScalarType::Float || type == ScalarType::Int ? 4
                                                                : 2;
}

// Read-only and writable data of a tensor, or a view of one, whose dtype the Python side has fixed.
template <typename scalar, typename Array>
const scalar* data_of(const Array& array) {
  return static_cast<const scalar*>(array.data_ptr());
}

template <typename scalar, typename Array>
scalar* mutable_data_of(const Array& array) {
  return static_cast<scalar*>(array.data_ptr());
}

template <typename scalar, typename Array>
const scalar* data_or_null(const std::optional<Array>& array) {
  return array.has_value() ? data_of<scalar>(*array) : nullptr;
}

// Calls work(value of the C++ type that `type` stands for), for the four floating-point types the
// ops take. A generic lambda gets the type by decltype.
template <typename Work>
void dispatch_floating(ScalarType type, const char* op, Work&& work) {
  switch (type) {
    case ScalarType::Float:
      return work(float());
    case ScalarType::Double:
      return work(double());
    case ScalarType::Half:
      return work(Half());
    case ScalarType::BFloat16:
      return work(BFloat16());
    default:
      STD_TORCH_CHECK(false, op, " takes float64, float32, float16 or bfloat16");
  }
}

// The same for the two types that recursions run in.
template <typename Work>
void dispatch_accumulator(ScalarType type, const char* op, Work&& work) {
  switch (type) {
    case ScalarType::Float:
      return work(float());
    case ScalarType::Double:
      return work(double());
    default:
      STD_TORCH_CHECK(false, op, " takes float64 or float32");
  }
}

}  // namespace pruned_rnnt
