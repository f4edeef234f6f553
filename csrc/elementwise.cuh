#pragma once
// What the CUDA access patterns of map.cuh and sum.cuh share: how a vector of elements is loaded, computed and stored,
// and the one <<<>>>, with its device guard, current stream and launch check. An op has no launch code of its own.

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <ATen/cuda/detail/IntegerDivider.cuh> // last: it does not include what it uses
#include <algorithm>
#include <utility>

#include "dtypes.h"
#include "kernel.h"
#include "plan.h"

namespace my_cuda_op::cuda {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16; // what one thread loads or stores at once; wider, or in a loop, was slower on an H200

template <class T>
constexpr int kLanes = kVectorBytes / sizeof(T);

template <class T>
struct alignas(kVectorBytes) Vector {
  T lane[kLanes<T>];
};

using Divider = at::cuda::detail::IntDivider<uint32_t>;

inline bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}

template <class Arguments>
void launch_kernel(c10::Device device, dim3 grid, void (*kernel)(Arguments), const Arguments& arguments) {
  const c10::cuda::CUDAGuard guard(device); // else a kernel for cuda:1 runs on cuda:0
  kernel<<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream(device.index())>>>(arguments);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// The operands of an op in a kernel, by the op's own numbers. Strides are in bytes.
template <class Op, class T, int kDims>
struct Operands {
  using C = at::opmath_type<T>;
  static constexpr int kCount = ops::operands<Op>;

  char* data[kCount]; // null where absent
  int64_t element_strides[kCount]; // from one lane of a vector to the next
  bool aligned[kCount]; // every whole vector is contiguous and aligned
  bool wide[kCount]; // a parameter of type C, not T
  C numbers[Op::parameters + 1]; // + 1: an array must not be empty
  uint32_t* mask;

  // The dimensions from the fastest to the slowest. Offsets of work with more than one fit into 32 bits (see
  // for_each_plan), and division by an invariant is then a multiplication.
  int ndim;
  bool narrow;
  Divider sizes[kDims];
  int64_t strides[kDims][kCount];

  // The plan's operands from number `next` on; no dimensions yet.
  Operands(const Plan& plan, const Call& call, int next) : numbers{}, ndim(0), narrow(plan.ndim > 1) {
    mask = reinterpret_cast<uint32_t*>(call.mask);
    for (int p = 0; p < Op::parameters; ++p) {
      if (call.numbers[p]) numbers[p] = number_as<C>(*call.numbers[p]);
    }
    for (int k = 0; k < kCount; ++k) {
      data[k] = nullptr;
      element_strides[k] = 0;
      if (!call.present[k]) continue;
      const auto& operand = plan.operand[next++];
      data[k] = operand.data;
      wide[k] = operand.dtype == c10::CppTypeToScalarType<C>::value;
      element_strides[k] = plan.ndim == 0 ? 0 : operand.strides[0];
      aligned[k] = k == Op::mask_operand
                       ? element_strides[k] == 1 && (operand.data - reinterpret_cast<char*>(call.mask)) % kLanes<T> == 0
                       : element_strides[k] == sizeof(T) && is_aligned(operand.data);
    }
  }

  // Adds the plan's dimension d, in steps of so many elements, of which it has `size`.
  void add_dimension(const Plan& plan, const Call& call, int next, int d, int64_t size, int64_t step) {
    // The last dimension divides nothing, and may not fit into the divider's 31 bits.
    if (plan.ndim > 1) sizes[ndim] = Divider(static_cast<uint32_t>(size));
    for (int k = 0; k < kCount; ++k) {
      strides[ndim][k] = call.present[k] ? plan.operand[next++].strides[d] * step : 0;
      aligned[k] &= strides[ndim][k] % (k == Op::mask_operand ? kLanes<T> : kVectorBytes) == 0;
    }
    ++ndim;
  }

  // Adds the offsets of item `index` of all dimensions; returns its index in dimension 0.
  __device__ int64_t add_offsets(int64_t index, int64_t (&offsets)[kCount]) const {
    int64_t first = 0;
    if (!narrow) {
      first = index;
#pragma unroll
      for (int k = 0; k < kCount; ++k) offsets[k] += index * strides[0][k];
      return first;
    }
    uint32_t rest = static_cast<uint32_t>(index), sums[kCount] = {};
    for (int d = 0; d < ndim; ++d) {
      uint32_t i = rest;
      if (d + 1 < ndim) {
        const auto divided = sizes[d].divmod(rest);
        rest = divided.div;
        i = divided.mod;
      }
      if (d == 0) first = i;
#pragma unroll
      for (int k = 0; k < kCount; ++k) sums[k] += i * static_cast<uint32_t>(strides[d][k]);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) offsets[k] += static_cast<int32_t>(sums[k]);
    return first;
  }
};

// Fills the lanes with `count` elements of T, `stride` bytes apart; with one load where they are a whole, aligned
// vector.
template <class T, class C>
__device__ void load(C (&lanes)[kLanes<T>], const char* data, int64_t stride, bool whole, int count) {
  Vector<T> vector;
  if (whole) {
    vector = *reinterpret_cast<const Vector<T>*>(data);
  } else if (stride == 0) {
    vector.lane[0] = *reinterpret_cast<const T*>(data);
#pragma unroll
    for (int i = 1; i < kLanes<T>; ++i) vector.lane[i] = vector.lane[0];
  } else {
#pragma unroll
    for (int i = 0; i < kLanes<T>; ++i)
      vector.lane[i] = *reinterpret_cast<const T*>(data + (i < count ? i : 0) * stride);
  }
#pragma unroll
  for (int i = 0; i < kLanes<T>; ++i) lanes[i] = static_cast<C>(vector.lane[i]);
}

// `count` bits of the mask, `stride` apart, from number `first` on; in one word where they are a whole, aligned vector.
__device__ inline unsigned load_bits(const uint32_t* mask, int64_t first, int64_t stride, bool whole, int count) {
  if (whole) return mask[first >> 5] >> (first & 31);
  unsigned bits = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t bit = first + i * stride;
    bits |= (mask[bit >> 5] >> (bit & 31) & 1) << i;
  }
  return bits;
}

// The lanes of the parameters of one vector.
template <class Op, class T, int kDims, class C>
__device__ void load_parameters(
    C (&lanes)[Op::parameters + 1][kLanes<T>],
    const Operands<Op, T, kDims>& a,
    const int64_t (&offsets)[ops::operands<Op>],
    int count) {
#pragma unroll
  for (int p = 0; p < Op::parameters; ++p) {
    const int k = Op::first_parameter + p;
    const char* data = a.data[k] + offsets[k];
    const int64_t stride = a.element_strides[k];
    if (a.data[k] == nullptr) {
#pragma unroll
      for (int i = 0; i < kLanes<T>; ++i) lanes[p][i] = a.numbers[p];
    } else if (a.wide[k]) {
      constexpr int kParts = kLanes<T> / kLanes<C>; // vectors
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        C some[kLanes<C>];
        const int left = count - part * kLanes<C>;
        load<C>(
            some, data + (left > 0 ? part * kLanes<C> * stride : 0), stride, count == kLanes<T> && a.aligned[k], left);
#pragma unroll
        for (int i = 0; i < kLanes<C>; ++i) lanes[p][part * kLanes<C> + i] = some[i];
      }
    } else {
      load<T>(lanes[p], data, stride, count == kLanes<T> && a.aligned[k], count);
    }
  }
}

// The op at one lane, as Values whatever it returns.
template <class Op, int kLanes, class C, size_t... t, size_t... p>
__device__ auto evaluate(
    unsigned keep,
    const C (&tensors)[Op::tensors][kLanes],
    const C (&parameters)[Op::parameters + 1][kLanes],
    int lane,
    std::index_sequence<t...>,
    std::index_sequence<p...>) {
  if constexpr (Op::reads_mask) {
    return Op::call(static_cast<bool>(keep >> lane & 1), tensors[t][lane]..., parameters[p][lane]...);
  } else {
    return ops::Values<C, 1>{Op::call(tensors[t][lane]..., parameters[p][lane]...)};
  }
}

// Computes one vector, of `count` elements, with the operands at these offsets: stores the outputs, and calls
// visit(lane, values) for each element. kFlat: every tensor is contiguous and aligned.
template <bool kFlat, class Op, class T, int kDims, class C, class F>
__device__ void compute(
    const Operands<Op, T, kDims>& a,
    const int64_t (&offsets)[ops::operands<Op>],
    const C (&parameters)[Op::parameters + 1][kLanes<T>],
    int count,
    const F& visit) {
  const bool whole = count == kLanes<T>;
  C tensors[Op::tensors][kLanes<T>];
#pragma unroll
  for (int t = 0; t < Op::tensors; ++t) {
    const int k = Op::first_tensor + t;
    if (t > 0 && a.data[k] == nullptr) {
#pragma unroll
      for (int i = 0; i < kLanes<T>; ++i) tensors[t][i] = ops::nothing<C>();
    } else {
      load<T>(
          tensors[t], a.data[k] + offsets[k], kFlat ? sizeof(T) : a.element_strides[k],
          whole && (kFlat || a.aligned[k]), count);
    }
  }
  unsigned keep = ~0u;
  if constexpr (Op::reads_mask) {
    constexpr int k = Op::mask_operand;
    if (a.data[k] != nullptr) {
      const int64_t first = a.data[k] - reinterpret_cast<char*>(a.mask) + offsets[k];
      keep = load_bits(a.mask, first, kFlat ? 1 : a.element_strides[k], whole && (kFlat || a.aligned[k]), count);
    }
  }

  Vector<T> out[Op::outputs];
#pragma unroll
  for (int i = 0; i < kLanes<T>; ++i) {
    const auto values = evaluate<Op>(
        keep, tensors, parameters, i, std::make_index_sequence<Op::tensors>(),
        std::make_index_sequence<Op::parameters>());
#pragma unroll
    for (int k = 0; k < Op::outputs; ++k) out[k].lane[i] = static_cast<T>(values.value[k]);
    if (i < count) visit(i, values);
  }
#pragma unroll
  for (int k = 0; k < Op::outputs; ++k) {
    char* data = a.data[k] + offsets[k];
    if (a.data[k] == nullptr) continue;
    if (whole && (kFlat || a.aligned[k])) {
      *reinterpret_cast<Vector<T>*>(data) = out[k];
    } else {
      const int64_t stride = kFlat ? sizeof(T) : a.element_strides[k];
#pragma unroll
      for (int i = 0; i < kLanes<T>; ++i) {
        if (i < count) *reinterpret_cast<T*>(data + i * stride) = out[k].lane[i];
      }
    }
  }
}

} // namespace my_cuda_op::cuda
