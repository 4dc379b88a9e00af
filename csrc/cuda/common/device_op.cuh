// Registers host functions that take views as CUDA kernels of torch's ops.
#pragma once

#include "cuda/common/launch.cuh"

namespace pruned_rnnt::cuda {

// The type that torch passes for a parameter of the host code, and the conversion.
template <typename parameter>
struct Passed {
  using type = parameter;
  static parameter unwrapped(parameter x) { return x; }
};

template <>
struct Passed<const View&> {
  using type = const Tensor&;
  static View unwrapped(const Tensor& x) { return View(x); }
};

template <>
struct Passed<const OptionalView&> {
  using type = const OptionalTensor&;
  static OptionalView unwrapped(const OptionalTensor& x) {
    return x.has_value() ? OptionalView(View(*x)) : std::nullopt;
  }
};

template <typename First, typename... Others>
int32_t device_of_first(const First& first, const Others&... others) {
  if constexpr (std::is_same_v<First, Tensor>) {
    return first.get_device_index();
  } else {
    return device_of_first(others...);
  }
}

// Calls host_code(launcher on the device of the first tensor, arguments...).
template <auto host_code>
struct DeviceOp;

template <typename... Parameters, void (*host_code)(const Launcher&, Parameters...)>
struct DeviceOp<host_code> {
  static void call(typename Passed<Parameters>::type... arguments) {
    const Launcher launch(device_of_first(arguments...));
    host_code(launch, Passed<Parameters>::unwrapped(arguments)...);
  }
};

// Registers the host function `op` for the op of the same name.
#define PRUNED_RNNT_CUDA_OP(op) \
  STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) { m.impl(#op, TORCH_BOX(&DeviceOp<&op>::call)); }

}  // namespace pruned_rnnt::cuda
