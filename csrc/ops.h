#pragma once
// What every operator computes, and what its gradient is, side by side and once: the CPU and the CUDA kernels
// instantiate these structs. A formula sees numbers of the compute type only (float for half and bfloat16); which
// memory they come from, in what order and on which device is the business of elementwise_cpu.h and elementwise.cuh.

#include <c10/macros/Macros.h>
#include <c10/util/complex.h>

#include <cstdint>
#include <type_traits>

namespace my_cuda_op::ops {

template <class T>
inline constexpr bool is_complex = c10::is_complex<T>::value;
// uint16, uint32 and uint64, for which PyTorch has few operators
template <class T>
inline constexpr bool is_barebones = std::is_unsigned_v<T> && sizeof(T) > 1;

template <class T>
C10_HOST_DEVICE inline T conj(T x) {
  if constexpr (is_complex<T>) {
    return T(x.real(), -x.imag());
  } else {
    return x;
  }
}

// What an operand that was not given counts as: x + nothing is x, also for x = -0.
template <class T>
C10_HOST_DEVICE constexpr T nothing() {
  if constexpr (is_complex<T>) {
    return T(-0.0, -0.0);
  } else {
    return static_cast<T>(-0.0);
  }
}

// What an op computes at one element, where that is more than one number.
template <class T, int kCount>
struct Values {
  T value[kCount];
};

// An op: how many outputs it has at each element, from how many tensors' elements and how many parameters (numbers for
// the whole tensor, or for each channel).
template <int kTensors, int kParameters = 0, int kOutputs = 1>
struct Map {
  static constexpr int tensors = kTensors, parameters = kParameters, outputs = kOutputs;
  static constexpr int sums = 0; // of something at every element of a channel
  static constexpr bool has_residual = false; // the second tensor, which may be absent
  static constexpr bool writes_mask = false; // one bit an element, by keeps(output)
  static constexpr bool reads_mask = false; // which is then call's first argument
  static constexpr const char* parameter_names[] = {nullptr}; // an op with parameters names them
  // Its operands: outputs, tensors, parameters, and the mask that it reads.
  static constexpr int first_tensor = kOutputs, first_parameter = first_tensor + kTensors,
                       mask_operand = first_parameter + kParameters;
};
template <class Op>
inline constexpr int operands = Op::mask_operand + Op::reads_mask;

// y = x * factor. Its derivative by x is Scale itself, with conj(factor): there is no kernel for it.
struct Scale : Map<1, 1> {
  static constexpr const char *name = "scale", *parameter_names[] = {"factor"};
  template <class T>
  static constexpr bool takes = true;

  template <class T>
  C10_HOST_DEVICE static T call(T x, T factor) {
    return x * factor;
  }
};

// y = x + value. Its derivative by x is the identity: there is no kernel for it.
struct AddScalar : Map<1, 1> {
  static constexpr const char *name = "add_scalar", *parameter_names[] = {"value"};
  template <class T>
  static constexpr bool takes = !is_barebones<T>;

  template <class T>
  C10_HOST_DEVICE static T call(T x, T value) {
    return x + value;
  }
};

// y = max(x, 0). Written with <=, which is false for NaN: a NaN goes through, and so does its gradient.
struct ReLU : Map<1> {
  static constexpr const char* name = "relu";
  static constexpr bool writes_mask = true;
  template <class T>
  static constexpr bool takes = !is_complex<T> && !is_barebones<T> && !std::is_same_v<T, bool>;

  template <class T>
  C10_HOST_DEVICE static T call(T x) {
    return x <= T(0) ? T(0) : x;
  }
  // Does the gradient pass where this is the output?
  template <class T>
  C10_HOST_DEVICE static bool keeps(T y) {
    return !(y <= T(0));
  }
};
struct ReLUBackward : Map<2> {
  static constexpr const char* name = "relu_backward";
  template <class T>
  static constexpr bool takes = ReLU::takes<T>;

  template <class T>
  C10_HOST_DEVICE static T call(T y, T grad) {
    return ReLU::keeps(y) ? grad : T(0);
  }
};

// y = x * factor + value, and + residual where that is given; and the same with a ReLU.
struct ScaleAdd : Map<2, 2> {
  static constexpr const char *name = "scale_add", *parameter_names[] = {"factor", "value"};
  static constexpr bool has_residual = true;
  template <class T>
  static constexpr bool takes = AddScalar::takes<T>;

  template <class T>
  C10_HOST_DEVICE static T call(T x, T residual, T factor, T value) {
    return x * factor + value + residual;
  }
};
struct ScaleAddReLU : ScaleAdd {
  static constexpr const char* name = "scale_add_relu";
  static constexpr bool writes_mask = true;
  template <class T>
  static constexpr bool takes = ReLU::takes<T>;

  template <class T>
  C10_HOST_DEVICE static T call(T x, T residual, T factor, T value) {
    return ReLU::call(ScaleAdd::call(x, residual, factor, value));
  }
  template <class T>
  C10_HOST_DEVICE static bool keeps(T y) {
    return ReLU::keeps(y);
  }
};
// All derivatives at once: by x, by residual, and what the element adds to that by value. Without a mask everything is
// kept. What needs the derivative by factor needs x, too.
struct ScaleAddBackward : Map<1, 1, 2> {
  static constexpr const char *name = "scale_add_backward", *parameter_names[] = {"factor"};
  static constexpr bool reads_mask = true;
  template <class T>
  static constexpr bool takes = std::is_floating_point_v<T> || is_complex<T>;

  template <class T>
  C10_HOST_DEVICE static Values<T, 3> call(bool keep, T grad, T factor) {
    const T kept = keep ? grad : T(0);
    return {kept * conj(factor), kept, kept};
  }
};
struct ScaleAddBackwardValue : ScaleAddBackward {
  static constexpr int sums = 1;
};
struct ScaleAddBackwardFactorValue : Map<2, 1, 2> {
  static constexpr const char *name = ScaleAddBackward::name, *parameter_names[] = {"factor"};
  static constexpr bool reads_mask = true;
  static constexpr int sums = 2;
  template <class T>
  static constexpr bool takes = ScaleAddBackward::takes<T>;

  template <class T>
  C10_HOST_DEVICE static Values<T, 4> call(bool keep, T grad, T x, T factor) {
    const auto by = ScaleAddBackward::call(keep, grad, factor);
    return {by.value[0], by.value[1], by.value[1] * conj(x), by.value[2]};
  }
};
struct ScaleAddBackwardFactor : ScaleAddBackwardFactorValue {
  static constexpr int sums = 1;
};

// What csrc/forward and csrc/backward compile, for each device.
template <class... Ops>
struct List {};
using Forward = List<Scale, AddScalar, ReLU, ScaleAdd, ScaleAddReLU>;
using Backward =
    List<ReLUBackward, ScaleAddBackward, ScaleAddBackwardFactor, ScaleAddBackwardValue, ScaleAddBackwardFactorValue>;

} // namespace my_cuda_op::ops
