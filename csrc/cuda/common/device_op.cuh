// Registers host functions that take views as CUDA kernels of torch's ops.
#pragma once

#include "cuda/common/launch.cuh"
#include "op.h"

namespace pruned_rnnt::cuda {

// Calls host_code(launcher on the device of the arguments, arguments...) if they fulfil the
// contract.
template <typename Name, void (*contract)(Arguments&), auto host_code>
struct DeviceOp;

template <typename Name, void (*contract)(Arguments&), typename... Parameters,
          void (*host_code)(const Launcher&, Parameters...)>
struct DeviceOp<Name, contract, host_code>
    : Boxed<DeviceOp<Name, contract, host_code>, typename Gather<Parameters...>::Fields> {
  template <typename Flat>
  static void run(const Flat& flat) {
    const Launcher launch(
        checked_device(Name::value, contract, aoti_torch_device_type_cuda(), flat).index);
    Gather<Parameters...>::call(host_code, flat, launch);
  }
};

// Registers the host function `op` for the op of the same name.
#define PRUNED_RNNT_CUDA_OP(op)                                                \
  PRUNED_RNNT_OP_NAME(op)                                                      \
  STABLE_TORCH_LIBRARY_IMPL(pruned_rnnt, CUDA, m) {                            \
    m.impl(#op, TORCH_BOX((&DeviceOp<op##_name, &contracts::op, &op>::call))); \
  }

}  // namespace pruned_rnnt::cuda
