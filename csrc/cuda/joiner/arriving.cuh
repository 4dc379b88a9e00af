// A number on the device on its way to the host.
#pragma once

#include <chrono>
#include <optional>
#include <thread>

#include "cuda/common/launch.cuh"

namespace pruned_rnnt::cuda {

// Unknown while it has not arrived, and always in the capture of a CUDA graph, which replays with
// other numbers.
class Arriving {
 public:
  // number: (1,) int32 on the device.
  Arriving(const Launcher& launch, const Tensor& number) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(launch.stream(), &status), "asking for a capture");
    if (status != cudaStreamCaptureStatusNone) return;
    // In pinned memory, which torch keeps until the copy is made.
    copy_ = torch::stable::to(number, torch::stable::Device(torch::headeronly::DeviceType::CPU),
                              /*non_blocking=*/true);
    check(cudaEventCreateWithFlags(&copied_, cudaEventDisableTiming), "creating an event");
    check(cudaEventRecord(copied_, launch.stream()), "recording an event");
  }
  Arriving(const Arriving&) = delete;
  Arriving& operator=(const Arriving&) = delete;
  ~Arriving() {
    if (copied_ != nullptr) (void)cudaEventDestroy(copied_);
  }

  // Waits for the number, but not longer than `patience` after the first call.
  std::optional<int64_t> value(std::chrono::microseconds patience) {
    using Clock = std::chrono::steady_clock;
    if (known_.has_value() || copied_ == nullptr) return known_;
    if (!deadline_.has_value()) deadline_ = Clock::now() + patience;
    while (!arrived() && Clock::now() < *deadline_) {
      std::this_thread::sleep_for(std::chrono::microseconds(10));
    }
    return known_;
  }

 private:
  bool arrived() {
    const cudaError_t status = cudaEventQuery(copied_);
    if (status == cudaErrorNotReady) {
      // Not an error; the next launch must not find it.
      (void)cudaGetLastError();
      return false;
    }
    check(status, "copying to the host");
    known_ = *data_of<int32_t>(*copy_);
    return true;
  }

  OptionalTensor copy_;
  cudaEvent_t copied_ = nullptr;
  std::optional<int64_t> known_;
  std::optional<std::chrono::steady_clock::time_point> deadline_;
};

}  // namespace pruned_rnnt::cuda
