// Host functions of ops, which take views, as kernels that torch calls with tensors.
#pragma once

#include <tuple>

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
template <typename Flat>
Device checked_device(const char* op, void (*contract)(Arguments&), int32_t device_type,
                      const Flat& flat) {
  const auto check = [&](const auto&... seen) {
    const Arguments::Item items[] = {item_of(seen)...};
    Arguments in(op, items, sizeof...(seen), device_type);
    contract(in);
    in.finish();
    return in.device();
  };
  return std::apply([&](const auto&... arguments) { return check(seen_by_contract(arguments)...); },
                    flat);
}

// The types in the schema of a host function's parameter: its own, or those of the consecutive
// arguments that are the fields of a struct with `Fields`.
template <typename parameter, typename = void>
struct FieldsOf {
  using type = std::tuple<parameter>;
};
template <typename group>
struct FieldsOf<const group&, std::void_t<typename group::Fields>> {
  using type = typename group::Fields;
};

// Calls host_code(leading..., parameters...) with the parameters made of the arguments `flat`.
template <typename... Parameters>
struct Gather {
  using Fields = decltype(std::tuple_cat(std::declval<typename FieldsOf<Parameters>::type>()...));

  template <typename HostCode, typename Flat, typename... Leading>
  static void call(HostCode host_code, const Flat& flat, const Leading&... leading) {
    call(std::index_sequence_for<Parameters...>(), host_code, flat, leading...);
  }

 private:
  static constexpr size_t kCounts[] = {std::tuple_size_v<typename FieldsOf<Parameters>::type>...};
  static constexpr size_t first_field(size_t parameter) {
    return parameter == 0 ? 0 : first_field(parameter - 1) + kCounts[parameter - 1];
  }
  template <size_t... i, typename HostCode, typename Flat, typename... Leading>
  static void call(std::index_sequence<i...>, HostCode host_code, const Flat& flat,
                   const Leading&... leading) {
    host_code(leading..., gathered<Parameters, first_field(i)>(
                              flat, std::make_index_sequence<kCounts[i]>())...);
  }
  template <typename parameter, size_t first, typename Flat, size_t... i>
  static std::decay_t<parameter> gathered(const Flat& flat, std::index_sequence<i...>) {
    return {std::get<first + i>(flat)...};
  }
};

// Op::run with the arguments, of the types Fields, as torch passes them.
template <typename Op, typename Fields>
struct Boxed;

template <typename Op, typename... fields>
struct Boxed<Op, std::tuple<fields...>> {
  static void call(typename Passed<fields>::type... arguments) {
    Op::run(std::tuple<decltype(Passed<fields>::unwrapped(arguments))...>(
        Passed<fields>::unwrapped(arguments)...));
  }
};

// Calls host_code(arguments...) if they fulfil the contract.
template <typename Name, void (*contract)(Arguments&), auto host_code>
struct CpuOp;

template <typename Name, void (*contract)(Arguments&), typename... Parameters,
          void (*host_code)(Parameters...)>
struct CpuOp<Name, contract, host_code>
    : Boxed<CpuOp<Name, contract, host_code>, typename Gather<Parameters...>::Fields> {
  template <typename Flat>
  static void run(const Flat& flat) {
    checked_device(Name::value, contract, aoti_torch_device_type_cpu(), flat);
    Gather<Parameters...>::call(host_code, flat);
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
