// A tensor's data pointer, type, device, sizes and strides, without ownership. torch's handles hold
// the same, but creating one costs as much as a launch, and a pruned step has a hundred buffers
// inside a few allocations.
#pragma once

#include <algorithm>
#include <array>

#include "stable.h"

namespace pruned_rnnt {

struct Device {
  int32_t type = -1, index = -1;  // of a view of a part of memory: unknown

  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
};

constexpr int kMostDims = 4;

class View {
 public:
  View() = default;
  View(void* data, ScalarType type, int dims, const std::array<int64_t, kMostDims>& sizes,
       const std::array<int64_t, kMostDims>& strides)
      : data_(data), type_(type), dims_(dims), sizes_(sizes), strides_(strides) {}
  explicit View(const Tensor& tensor) : data_(tensor.data_ptr()), type_(tensor.scalar_type()) {
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    dims_ = static_cast<int>(sizes.size());
    // Contracts refuse tensors of more dimensions.
    for (int i = 0; i < std::min(dims_, kMostDims); ++i) {
      sizes_[i] = sizes[i];
      strides_[i] = strides[i];
    }
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device_.type));
    device_.index = tensor.get_device_index();
  }

  void* data_ptr() const { return data_; }
  ScalarType scalar_type() const { return type_; }
  const Device& device() const { return device_; }
  int dim() const { return dims_; }
  int64_t size(int i) const { return sizes_[i]; }
  int64_t stride(int i) const { return strides_[i]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int i = 0; i < dims_; ++i) count *= sizes_[i];
    return count;
  }

 private:
  void* data_ = nullptr;
  ScalarType type_ = ScalarType::Float;
  Device device_;
  int dims_ = 0;
  std::array<int64_t, kMostDims> sizes_{}, strides_{};
};

using OptionalView = std::optional<View>;

// Elements from one row to the next of a view (N,rows,columns) whose rows are evenly spaced.
inline int64_t row_pitch(const View& view) {
  if (view.size(1) > 1) return view.stride(1);
  return view.size(0) > 1 ? view.stride(0) : view.size(2);
}

}  // namespace pruned_rnnt
