// The only header that includes torch: its stable ABI, as of torch 2.11 (TORCH_TARGET_VERSION,
// CMakeLists.txt).
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

// STD_TORCH_CHECK in debug builds (CMAKE_BUILD_TYPE=Debug), else nothing.
#ifdef PRUNED_RNNT_DEBUG
#define PRUNED_RNNT_ASSERT(...) STD_TORCH_CHECK(__VA_ARGS__)
#else
#define PRUNED_RNNT_ASSERT(...) ((void)0)
#endif

// Accumulator type of sums and recursions over inputs of type `scalar`.
template <typename scalar>
using acc_type = std::conditional_t<std::is_same_v<scalar, double>, double, float>;

// acc_type of a type that is known when the op runs.
inline ScalarType accumulator_of(ScalarType type) {
  return type == ScalarType::Double ? type : ScalarType::Float;
}

// Element size of a type that the ops take: floating point, int32 or int64.
inline int64_t element_bytes(ScalarType type) {
  return type == ScalarType::Double || type == ScalarType::Long ? 8
         : type == ScalarType::Float || type == ScalarType::Int ? 4
                                                                : 2;
}

// Data of a tensor or a view. The contract of an op has compared its arguments with what its
// kernels read (arguments.h); here, a pointer of another type is a mistake of this library.
template <typename scalar, typename Array>
scalar* mutable_data_of(const Array& array) {
  constexpr ScalarType type = torch::headeronly::CppTypeToScalarType<scalar>::value;
  STD_TORCH_CHECK(array.scalar_type() == type, "pruned_rnnt: a kernel reads ",
                  torch::headeronly::toString(type), ", but a tensor is ",
                  torch::headeronly::toString(array.scalar_type()));
  return static_cast<scalar*>(array.data_ptr());
}

template <typename scalar, typename Array>
const scalar* data_of(const Array& array) {
  return mutable_data_of<scalar>(array);
}

template <typename scalar, typename Array>
const scalar* data_or_null(const std::optional<Array>& array) {
  return array.has_value() ? data_of<scalar>(*array) : nullptr;
}

// Calls work(std::integral_constant<T, choice>()) for the one of `choices` that equals `value`;
// false if there is none.
template <auto... choices, typename Value, typename Work>
bool dispatch_value(Value value, Work&& work) {
  return (
      (value == choices && (work(std::integral_constant<decltype(choices), choices>()), true)) ||
      ...);
}

// Calls work(T()) for the one of `Types` that `type` stands for; false if there is none. A generic
// lambda gets T by decltype.
template <typename... Types, typename Work>
bool dispatch_type(ScalarType type, Work&& work) {
  return ((type == torch::headeronly::CppTypeToScalarType<Types>::value && (work(Types()), true)) ||
          ...);
}

// For the four floating-point types that the ops take.
template <typename Work>
void dispatch_floating(ScalarType type, const char* op, Work&& work) {
  const bool found = dispatch_type<float, double, Half, BFloat16>(type, work);
  STD_TORCH_CHECK(found, op, " takes float64, float32, float16 or bfloat16");
}

// For the two types that recursions run in.
template <typename Work>
void dispatch_accumulator(ScalarType type, const char* op, Work&& work) {
  const bool found = dispatch_type<float, double>(type, work);
  STD_TORCH_CHECK(found, op, " takes float64 or float32");
}

}  // namespace pruned_rnnt
