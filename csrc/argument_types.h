// Sizes, types and layouts of the arguments of ops, as contracts state them (arguments.h).
#pragma once

#include <initializer_list>
#include <sstream>
#include <string>

#include "stable.h"

namespace pruned_rnnt {

constexpr int64_t kMostInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMostInt64 = std::numeric_limits<int64_t>::max();

// A size that several arguments have; the first of them sets it.
class Size {
 public:
  explicit Size(const char* name, int64_t most = kMostInt32) : name_(name), most_(most) {}

  bool known() const { return value_ >= 0; }
  int64_t value() const { return value_; }
  const char* name() const { return name_; }
  // False if it is not that size, or no size at all.
  bool agrees(int64_t value) {
    if (value < 0 || value > most_) return false;
    if (!known()) value_ = value;
    return value_ == value;
  }

 private:
  const char* name_;
  int64_t most_, value_ = -1;
};

// A dimension: a size, a size and a number, or a number alone.
struct Extent {
  Extent(Size& size) : size(&size) {}
  Extent(int64_t number) : added(number) {}
  Extent(Size& size, int64_t added, bool is_least = false)
      : size(&size), added(added), is_least(is_least) {}

  bool fits(int64_t actual) const {
    if (is_least) return actual >= least();
    return size != nullptr ? size->agrees(actual - added) : actual == added;
  }
  int64_t least() const { return (size != nullptr ? size->value() : 0) + added; }
  std::string text() const {
    std::ostringstream out;
    if (is_least) out << "at least ";
    if (size != nullptr) {
      out << size->name();
      if (added != 0) out << " + " << added;
      if (!size->known()) return out.str();
      out << " = ";
    }
    out << least();
    return out.str();
  }

  Size* size = nullptr;
  int64_t added = 0;
  bool is_least = false;
};

inline Extent operator+(Size& size, int64_t added) { return {size, added}; }
// Of a known size.
inline Extent at_least(Extent x) {
  x.is_least = true;
  return x;
}

using Shape = std::initializer_list<Extent>;

enum class Type {
  kScalar,         // of the inputs and their gradients: the four floating-point types
  kReal,           // the accumulator of kScalar
  kScalarOrReal,   // for an output that kernels write in either
  kScalarOrFloat,  // for an input that kernels cast
  kAnyScalar,      // of the four, whatever that of others is
  kStored,         // of the trivial joiner's exponentials: kReal, or BFloat16 for parts of floats
  kFloat32,
  kBFloat16,
  kInt32,
  kInt64,
  kBytes,  // uint8
  kBool
};

enum class Layout {
  kContiguous,
  kRows,     // of a matrix: contiguous rows, at least their length apart
  kLines,    // of a matrix: contiguous rows or columns, at least their length apart
  kPitched,  // (N,rows,columns): contiguous rows that are evenly spaced
};

// The types of an op's arguments: the first of a kind sets it.
class KnownTypes {
 public:
  void set_scalar(ScalarType type) {
    scalar_ = type;
    real_ = accumulator_of(type);
  }
  bool fits(ScalarType actual, Type type) {
    switch (type) {
      case Type::kScalar:
        return is_scalar(actual) && agrees(scalar_, actual) &&
               agrees(real_, accumulator_of(actual));
      case Type::kReal:
        return is_real(actual) && agrees(real_, actual);
      case Type::kScalarOrReal:
        return actual == scalar_ || actual == real_;
      case Type::kScalarOrFloat:
        return actual == scalar_ || actual == ScalarType::Float;
      case Type::kAnyScalar:
        return is_scalar(actual);
      case Type::kStored:
        if (actual == ScalarType::BFloat16) {
          if (!agrees(real_, ScalarType::Float)) return false;
        } else if (!is_real(actual) || !agrees(real_, actual)) {
          return false;
        }
        return agrees(stored_, actual);
      case Type::kFloat32:
        return actual == ScalarType::Float;
      case Type::kBFloat16:
        return actual == ScalarType::BFloat16;
      case Type::kInt32:
        return actual == ScalarType::Int;
      case Type::kInt64:
        return actual == ScalarType::Long;
      case Type::kBytes:
        return actual == ScalarType::Byte;
      case Type::kBool:
        return actual == ScalarType::Bool;
    }
    return false;
  }
  // In words.
  std::string needed(Type type) const {
    const auto or_any = [](const std::optional<ScalarType>& known, const char* any) {
      return std::string(known.has_value() ? name_of(*known) : any);
    };
    switch (type) {
      case Type::kScalar:
        if (!scalar_.has_value() && real_ == ScalarType::Double) return "float64";
        if (!scalar_.has_value() && real_.has_value()) return "float32, float16 or bfloat16";
        return or_any(scalar_, "float64, float32, float16 or bfloat16");
      case Type::kReal:
        return or_any(real_, "float64 or float32");
      case Type::kScalarOrReal:
        return or_any(scalar_, "") + " or " + or_any(real_, "");
      case Type::kScalarOrFloat:
        return or_any(scalar_, "") + " or float32";
      case Type::kAnyScalar:
        return or_any({}, "float64, float32, float16 or bfloat16");
      case Type::kStored:
        return or_any(stored_, real_ == ScalarType::Double ? "float64" : "float32 or bfloat16");
      case Type::kFloat32:
        return "float32";
      case Type::kBFloat16:
        return "bfloat16";
      case Type::kInt32:
        return "int32";
      case Type::kInt64:
        return "int64";
      case Type::kBytes:
        return "uint8";
      case Type::kBool:
        return "bool";
    }
    return "";
  }
  static const char* name_of(ScalarType type) {
    switch (type) {
      case ScalarType::Double:
        return "float64";
      case ScalarType::Float:
        return "float32";
      case ScalarType::Half:
        return "float16";
      case ScalarType::BFloat16:
        return "bfloat16";
      case ScalarType::Int:
        return "int32";
      case ScalarType::Long:
        return "int64";
      case ScalarType::Bool:
        return "bool";
      default:
        return torch::headeronly::toString(type);
    }
  }

 private:
  static bool is_real(ScalarType x) { return x == ScalarType::Float || x == ScalarType::Double; }
  static bool is_scalar(ScalarType x) {
    return is_real(x) || x == ScalarType::Half || x == ScalarType::BFloat16;
  }
  // Sets `known`, or compares.
  static bool agrees(std::optional<ScalarType>& known, ScalarType type) {
    if (!known.has_value()) known = type;
    return *known == type;
  }

  std::optional<ScalarType> scalar_, real_, stored_;
};

}  // namespace pruned_rnnt
