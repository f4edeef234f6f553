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

// An op that computes each element by itself, from `tensors` elements and `parameters` numbers (one for the whole
// tensor, or one for each channel).
template <int kTensors, int kParameters = 0>
struct Map {
  static constexpr bool is_sum = false;
  static constexpr int tensors = kTensors, parameters = kParameters;
  static constexpr const char* parameter_names[] = {nullptr}; // an op with parameters names them
};

// An op that adds up, for each channel, what every element of it contributes.
template <int kTensors>
struct Sum {
  static constexpr bool is_sum = true;
  static constexpr int tensors = kTensors, parameters = 0;
};

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
struct ScaleBackwardFactor : Sum<2> {
  static constexpr const char *name = "scale_backward_factor", *parameter_names[] = {"factor"};
  template <class T>
  static constexpr bool takes = std::is_floating_point_v<T> || is_complex<T>;

  template <class T>
  C10_HOST_DEVICE static T call(T grad, T x) {
    return grad * conj(x);
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
struct AddScalarBackwardValue : Sum<1> {
  static constexpr const char *name = "add_scalar_backward_value", *parameter_names[] = {"value"};
  template <class T>
  static constexpr bool takes = ScaleBackwardFactor::takes<T>;

  template <class T>
  C10_HOST_DEVICE static T call(T grad) {
    return grad;
  }
};

// y = max(x, 0). Written with <=, which is false for NaN: a NaN goes through, and so does its gradient.
struct ReLU : Map<1> {
  static constexpr const char* name = "relu";
  template <class T>
  static constexpr bool takes = !is_complex<T> && !is_barebones<T> && !std::is_same_v<T, bool>;

  template <class T>
  C10_HOST_DEVICE static T call(T x) {
    return x <= T(0) ? T(0) : x;
  }
};
struct ReLUBackward : Map<2> {
  static constexpr const char* name = "relu_backward";
  template <class T>
  static constexpr bool takes = ReLU::takes<T>;

  template <class T>
  C10_HOST_DEVICE static T call(T y, T grad) {
    return y <= T(0) ? T(0) : grad;
  }
};

// What csrc/forward and csrc/backward compile, for each device.
template <class... Ops>
struct List {};
using Forward = List<Scale, AddScalar, ReLU>;
using Backward = List<ScaleBackwardFactor, AddScalarBackwardValue, ReLUBackward>;

} // namespace my_cuda_op::ops
