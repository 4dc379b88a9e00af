// A number of rows on the device on its way to the host: a host that is behind the device saves the
// launches of chunks without rows, one that is ahead has the time.
#pragma once

#include <optional>

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

  // True if the number has arrived and is at most `count`. Does not wait.
  bool known_to_end_by(int64_t count) {
    if (!known_.has_value() && copied_ != nullptr && arrived()) {
      known_ = *data_of<int32_t>(*copy_);
    }
    return known_.has_value() && *known_ <= count;
  }

 private:
  bool arrived() const {
    const cudaError_t status = cudaEventQuery(copied_);
    // Not an error; the next launch must not find it.
    if (status == cudaErrorNotReady) {
      (void)cudaGetLastError();
      return false;
    }
    check(status, "copying to the host");
    return true;
  }

  OptionalTensor copy_;
  cudaEvent_t copied_ = nullptr;
  std::optional<int64_t> known_;
};

}  // namespace pruned_rnnt::cuda
