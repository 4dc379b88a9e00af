// The arguments of an op, which its contract (csrc/contracts) reads in the order of the schema and
// compares with what the kernels read and write: dtype, device, layout and size. It does so once,
// before any of them is used, and throws an error that names the argument.
//
// A contract is shared by the CPU and CUDA kernels of an op:
//
//   inline void lattice(Arguments& in) {
//     Size N{"N"}, U{"U"}, T{"T"};
//     in.tensor("py", kReal, {N, U + 1, T});     // sets N, U and T
//     in.optional("boundary", kInt32, {N, 4});   // compares N
//
// Flags and real numbers, which say nothing about memory, are not read.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "argument_types.h"
#include "view.h"

namespace pruned_rnnt {

class Arguments {
 public:
  // What torch passes for a parameter: a tensor, nothing for an optional one, a number, several
  // numbers or tensors. kSkipped: not a part of contracts.
  struct Item {
    enum Kind { kTensor, kNothing, kNumber, kNumbers, kTensors, kSkipped } kind;
    const void* data = nullptr;
    int64_t number = 0;
  };

  // The first tensor on a device of that type says which device.
  Arguments(const char* op, const Item* items, size_t count, int32_t device_type)
      : op_(op), items_(items), end_(items + count) {
    for (const Item* item = items; item < end_ && device_.type < 0; ++item) {
      if (item->kind != Item::kTensor) continue;
      const Device& device = static_cast<const View*>(item->data)->device();
      if (device.type == device_type) device_ = device;
    }
  }

  const View& tensor(const char* name, Type type, Shape shape,
                     Layout layout = Layout::kContiguous) {
    const View& view = unchecked(name);
    check(view, name, type, shape, layout);
    return view;
  }
  // Of a dtype, size or device that later arguments say, for `check`.
  const View& unchecked(const char* name) {
    return *static_cast<const View*>(next(Item::kTensor, name).data);
  }
  // Null if there is none.
  const View* unchecked_optional(const char* name) {
    const Item& item = next_of(name);
    if (item.kind != Item::kNothing && item.kind != Item::kTensor) mistake(name);
    return static_cast<const View*>(item.data);
  }
  const View* optional(const char* name, Type type, Shape shape,
                       Layout layout = Layout::kContiguous) {
    const View* const view = unchecked_optional(name);
    if (view != nullptr) check(*view, name, type, shape, layout);
    return view;
  }
  // Contiguous, of any shape with so many elements.
  const View& flat(const char* name, Type type, const Extent& elements) {
    const View& view = unchecked(name);
    check_flat(view, name, type, elements);
    return view;
  }
  int64_t number(const char* name, int64_t least, int64_t most) {
    const int64_t value = next(Item::kNumber, name).number;
    STD_TORCH_CHECK(value >= least && value <= most, "pruned_rnnt::", op_, ": `", name,
                    "` must be in ", least, " .. ", most, ", but is ", value);
    return value;
  }
  // A number of that size.
  void size(const char* name, Size& size) {
    const int64_t value = next(Item::kNumber, name).number;
    STD_TORCH_CHECK(size.agrees(value), "pruned_rnnt::", op_, ": `", name, "` must be ",
                    size.known() ? Extent(size).text() : "a size", ", but is ", value);
  }
  const std::vector<int64_t>& numbers(const char* name) {
    return *static_cast<const std::vector<int64_t>*>(next(Item::kNumbers, name).data);
  }
  // Null if there are none.
  const std::vector<Tensor>* tensors(const char* name) {
    const Item& item = next_of(name);
    if (item.kind == Item::kNothing) return nullptr;
    if (item.kind != Item::kTensors) mistake(name);
    return static_cast<const std::vector<Tensor>*>(item.data);
  }

  // What kScalar is, and kReal with it.
  void set_scalar(ScalarType type) { types_.set_scalar(type); }
  // A condition on several arguments; needed: in words, with the names of the arguments.
  void require(bool holds, const char* needed) const {
    STD_TORCH_CHECK(holds, "pruned_rnnt::", op_, ": ", needed);
  }
  void check(const View& view, const char* name, Type type, Shape shape,
             Layout layout = Layout::kContiguous) {
    if (!types_.fits(view.scalar_type(), type) || !(view.device() == device_) ||
        !has_shape(view, shape) || !has_layout(view, layout)) {
      refuse(view, name, type, shape, layout, nullptr);
    }
  }
  void check_flat(const View& view, const char* name, Type type, const Extent& elements) {
    if (!types_.fits(view.scalar_type(), type) || !(view.device() == device_) ||
        !has_layout(view, Layout::kContiguous) || !elements.fits(view.numel())) {
      refuse(view, name, type, {}, Layout::kContiguous, &elements);
    }
  }
  // After the last argument.
  void finish() {
    while (item_at_ < end_ && item_at_->kind == Item::kSkipped) ++item_at_;
    if (item_at_ != end_) mistake("the end");
  }

  const Device& device() const { return device_; }
  bool on_cpu() const { return device_.type == aoti_torch_device_type_cpu(); }

 private:
  const Item& next_of(const char* name) {
    while (item_at_ < end_ && item_at_->kind == Item::kSkipped) ++item_at_;
    if (item_at_ == end_) mistake(name);
    return *item_at_++;
  }
  const Item& next(Item::Kind kind, const char* name) {
    const Item& item = next_of(name);
    if (item.kind != kind) mistake(name);
    return item;
  }
  [[noreturn]] void mistake(const char* name) const {
    STD_TORCH_CHECK(false, "pruned_rnnt::", op_, ": the contract does not fit the schema at ",
                    name);
    std::abort();
  }

  static bool has_shape(const View& view, Shape shape) {
    if (view.dim() != static_cast<int>(shape.size())) return false;
    int i = 0;
    for (const Extent& extent : shape) {
      if (!extent.fits(view.size(i++))) return false;
    }
    return true;
  }
  static bool has_layout(const View& view, Layout layout) {
    if (view.dim() > kMostDims) return false;
    if (view.numel() == 0) return true;
    const int last = view.dim() - 1;
    if (layout == Layout::kContiguous) {
      int64_t stride = 1;
      for (int i = last; i >= 0; stride *= view.size(i--)) {
        if (view.size(i) > 1 && view.stride(i) != stride) return false;
      }
      return true;
    }
    const auto dense = [&](int lines, int along) {
      return (view.size(along) <= 1 || view.stride(along) == 1) &&
             (view.size(lines) <= 1 || view.stride(lines) >= view.size(along));
    };
    if (layout == Layout::kLines && dense(last, last - 1)) return true;
    if (!dense(last - 1, last)) return false;
    if (layout != Layout::kPitched || view.size(0) <= 1) return true;
    const int64_t pitch = view.size(1) > 1 ? view.stride(1) * view.size(1) : view.stride(0);
    return view.stride(0) == pitch && pitch >= view.size(2);
  }

  static std::string text_of(const Device& device) {
    std::string name = device.type == aoti_torch_device_type_cpu()    ? "cpu"
                       : device.type == aoti_torch_device_type_cuda() ? "cuda"
                                                                      : "another device";
    return device.index > 0 ? name + ":" + std::to_string(device.index) : name;
  }
  // elements: of an argument of any shape, else null.
  [[noreturn]] void refuse(const View& view, const char* name, Type type, Shape shape,
                           Layout layout, const Extent* elements) const {
    static constexpr const char* kLayouts[] = {"contiguous", "with contiguous rows",
                                               "with contiguous rows or columns",
                                               "with contiguous and evenly spaced rows"};
    std::ostringstream out;
    out << "`" << name << "` must be " << types_.needed(type) << " on " << text_of(device_) << ", "
        << kLayouts[static_cast<int>(layout)] << ", ";
    if (elements != nullptr) {
      out << "of " << elements->text() << " elements";
    } else {
      out << "of shape (";
      const char* separator = "";
      for (const Extent& extent : shape) {
        out << separator << extent.text();
        separator = ", ";
      }
      out << ")";
    }
    out << ", but is " << KnownTypes::name_of(view.scalar_type()) << " on "
        << text_of(view.device()) << " of " << view.dim() << " dimensions";
    const char* separator = ", of sizes ";
    for (int i = 0; i < std::min(view.dim(), kMostDims); ++i, separator = ", ") {
      out << separator << view.size(i);
    }
    separator = " and strides ";
    for (int i = 0; i < std::min(view.dim(), kMostDims); ++i, separator = ", ") {
      out << separator << view.stride(i);
    }
    STD_TORCH_CHECK(false, "pruned_rnnt::", op_, ": ", out.str());
    std::abort();
  }

  const char* op_;
  const Item *items_, *end_, *item_at_ = items_;
  Device device_;
  KnownTypes types_;
};

}  // namespace pruned_rnnt
