#pragma once
// How host code finds the kernel of an op on a device: a file that is compiled registers its kernels, and kernel<Op>()
// of a device that has none says so. nvcc reads this header too, so it holds no ATen beyond a forward declaration.

#include <c10/core/DeviceType.h>
#include <c10/core/Scalar.h>
#include <c10/util/Exception.h>

#include <array>
#include <optional>
#include <type_traits>

#include "ops.h"

namespace at {
struct TensorIteratorBase;
}

namespace my_cuda_op {

constexpr int kMaxOperands = 6; // of one kernel, outputs and all

// The parameters of a Map that were given as numbers; one that is absent is a tensor, and so an operand of the
// iterator.
using Numbers = std::array<std::optional<c10::Scalar>, 2>;

// The rows of partial sums that a Sum writes. Which elements a row adds up depends on shapes only, never on threads or
// timing, and so the result is the same from run to run.
struct Rows {
  int64_t count;
  int64_t bytes; // from one row to the next
};

// The operands of a Map are its output, its tensors, and those parameters that are tensors.
// The operands of a Sum are its output and its tensors. The output is some rows of partial sums, one sum for each
// channel, and zero before; the iterator sees the first row, expanded to the tensors' shape.
template <class Op>
using KernelFunction =
    void (*)(at::TensorIteratorBase& iter, std::conditional_t<Op::is_sum, const Rows&, const Numbers&> rows_or_numbers);

template <class Op>
inline std::array<KernelFunction<Op>, c10::COMPILE_TIME_MAX_DEVICE_TYPES> kernels{};

template <template <class> class Launcher, class... Ops>
bool register_kernels(c10::DeviceType device, ops::List<Ops...>) {
  ((kernels<Ops>[static_cast<size_t>(device)] = &Launcher<Ops>::launch), ...);
  return true;
}

template <class Op>
KernelFunction<Op> kernel(c10::DeviceType device) {
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
  } else {
    return static_cast<T>(number.toLong());
  }
}

} // namespace my_cuda_op
