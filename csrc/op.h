// Host functions of ops, which take views, as kernels that torch calls with tensors.
#pragma once

#include "arguments.h"

namespace pruned_rnnt {

// The type that torch passes for a parameter of a host function, and the conversion.
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

// What a contract reads: for tensors that a host function takes as they are, views of them.
template <typename argument>
const argument& seen_by_contract(const argument& x) {
  return x;
}
inline View seen_by_contract(const Tensor& x) { return View(x); }
inline OptionalView seen_by_contract(const OptionalTensor& x) {
  return Passed<const OptionalView&>::unwrapped(x);
}

inline Arguments::Item item_of(const View& x) { return {Arguments::Item::kTensor, &x}; }
inline Arguments::Item item_of(const OptionalView& x) {
  return x.has_value() ? item_of(*x) : Arguments::Item{Arguments::Item::kNothing};
}
inline Arguments::Item item_of(int64_t x) { return {Arguments::Item::kNumber, nullptr, x}; }
inline Arguments::Item item_of(bool) { return {Arguments::Item::kSkipped}; }
inline Arguments::Item item_of(double) { return {Arguments::Item::kSkipped}; }
inline Arguments::Item item_of(const std::vector<int64_t>& x) {
  return {Arguments::Item::kNumbers, &x};
}
inline Arguments::Item item_of(const std::vector<Tensor>& x) {
  return {Arguments::Item::kTensors, &x};
}
inline Arguments::Item item_of(const std::optional<std::vector<Tensor>>& x) {
  return x.has_value() ? item_of(*x) : Arguments::Item{Arguments::Item::kNothing};
}

// Returns the device of the arguments, which is of that type.
template <typename... Seen>
Device checked_device(const char* op, void (*contract)(Arguments&), int32_t device_type,
                      const Seen&... arguments) {
  const Arguments::Item items[] = {item_of(arguments)...};
  Arguments in(op, items, sizeof...(Seen), device_type);
  contract(in);
  in.finish();
  return in.device();
}

// Calls host_code(arguments...) if they fulfil the contract.
template <typename Name, void (*contract)(Arguments&), auto host_code>
struct CpuOp;

template <typename Name, void (*contract)(Arguments&), typename... Parameters,
          void (*host_code)(Parameters...)>
struct CpuOp<Name, contract, host_code> {
  static void call(typename Passed<Parameters>::type... arguments) {
    run(Passed<Parameters>::unwrapped(arguments)...);
  }

 private:
  template <typename... Unwrapped>
  static void run(const Unwrapped&... arguments) {
    checked_device(Name::value, contract, aoti_torch_device_type_cpu(),
                   seen_by_contract(arguments)...);
    host_code(arguments...);
  }
};

// The name of an op as a type.
#define PRUNED_RNNT_OP_NAME(op)               \
  struct op##_name {                          \
    static constexpr const char* value = #op; \
  };

// Registers the host function `op` for the op of the same name on the CPU.
#define PRUNED_RNNT_CPU_OP(op)                                              \
  PRUNED_RNNT_OP_NAME(op)                                                   \
  STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CPU, m) {                          \
    m.impl(#op, TORCH_BOX((&CpuOp<op##_name, &contracts::op, &op>::call))); \
  }

}  // namespace pruned_rnnt
