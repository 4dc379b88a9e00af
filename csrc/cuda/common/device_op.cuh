// Functions of views as ops of torch: what stands between the dispatcher and the host code of a
// kernel.
#pragma once

#include "cuda/common/launch.cuh"

namespace pruned_rnnt {
namespace cuda {

// What torch passes for a parameter of the host code, and how it becomes that.
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

// host_code(launcher on the device of the first tensor, arguments...), to register by TORCH_BOX.
template <auto host_code>
struct DeviceOp;

template <typename... Parameters, void (*host_code)(const Launcher&, Parameters...)>
struct DeviceOp<host_code> {
  static void call(typename Passed<Parameters>::type... arguments) {
    const Launcher launch(device_of_first(arguments...));
    host_code(launch, Passed<Parameters>::unwrapped(arguments)...);
  }
};

}  // namespace cuda
}  // namespace pruned_rnnt
