#pragma once
// How host code finds the kernel of an op on a device: a file that is compiled registers its kernels, and kernel<Op>()
// of a device that has none says so. nvcc reads this header too, so it holds no ATen beyond a forward declaration.

#include <c10/core/DeviceType.h>
#include <c10/core/Scalar.h>
#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <array>
#include <bitset>
#include <optional>
#include <type_traits>

#include "ops.h"

namespace at {
struct TensorIteratorBase;
}

namespace my_cuda_op {

constexpr int kMaxOperands = 8; // of one kernel, outputs and all

// What a kernel must know beside the operands of its iterator. Those are, in this order: the partial sums (of an op
// that has some), the op's outputs, its tensors, its parameters, and the mask that it reads; each only where present.
struct Call {
  c10::ScalarType dtype; // of the op's tensors and outputs
  std::bitset<kMaxOperands> present; // by the op's own numbers (ops.h); a parameter that is a number is not present
  std::array<std::optional<c10::Scalar>, 2> numbers; // by parameter

  // One bit for each element, in the order in which the elements of a dense tensor lie in memory, in words of 32 bits.
  // An op that writes a mask, where it is not null, writes one for its output. For one that reads it, the iterator's
  // operand is as if the mask had bytes: that of element n is at mask + n.
  uint8_t* mask = nullptr;

  // Row r of the partial sums number s begins at sums + r * row_bytes + s * sum_bytes. The iterator's operand is the
  // first row, expanded to the tensors' shape. The kernel overwrites them, or, where sums_are_zero, adds to them: so it
  // must be where for_each_plan has several plans, or none. Which elements a row adds up depends on shapes only, never
  // on threads or timing, and so the result is the same from run to run.
  char* sums = nullptr;
  int64_t rows = 0, row_bytes = 0, sum_bytes = 0;
  bool sums_are_zero = false;

  // Where the rows of sums number s, added up, go: as many numbers as there are channels, or one for all of them, of
  // the compute type (wide) or of `dtype`.
  struct Total {
    void* data = nullptr;
    bool wide = false, one = false;
  };
  std::array<Total, 2> totals;
};

using Kernel = void (*)(at::TensorIteratorBase& iter, const Call& call);

template <class Op>
inline std::array<Kernel, c10::COMPILE_TIME_MAX_DEVICE_TYPES> kernels{};

template <template <class> class Launcher, class... Ops>
bool register_kernels(c10::DeviceType device, ops::List<Ops...>) {
  ((kernels<Ops>[static_cast<size_t>(device)] = &Launcher<Ops>::launch), ...);
  return true;
}

template <class Op>
Kernel kernel(c10::DeviceType device) {
  auto function = kernels<Op>[static_cast<size_t>(device)];
  TORCH_CHECK_NOT_IMPLEMENTED(
      function != nullptr, Op::name, ": a tensor on ", device,
      " needs kernels for it, but this my_cuda_op was built without them (my_cuda_op.build_info() tells how). "
      "Install a CUDA toolkit and a CUDA build of torch, then rebuild with FORCE_CUDA=1: "
      "FORCE_CUDA=1 python -m pip install --no-build-isolation --force-reinstall --no-deps .");
  return function;
}

// Not Scalar::to, which refuses what does not fit: stock PyTorch wraps integers and lets floats become infinite.
template <class T>
T number_as(const c10::Scalar& number) {
  if constexpr (ops::is_complex<T>) {
    return static_cast<T>(number.toComplexDouble());
  } else if constexpr (std::is_floating_point_v<T>) {
    return static_cast<T>(number.toDouble());
  } else if (number.type() == c10::kUInt64) {
    return static_cast<T>(number.toUInt64());
  } else {
    return static_cast<T>(number.toLong());
  }
}

} // namespace my_cuda_op
