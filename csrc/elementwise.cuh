#pragma once
// The CUDA access patterns: one kernel and one <<<>>> for each. The device guard, the current stream, the launch check
// and the return for empty tensors are here, so an op has no launch code of its own.

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

// Dimensions and strides (in bytes) of a kernel's operands. Offsets of work with more than one dimension fit into 32
// bits (see for_each_plan), and division by an invariant is then a multiplication.
template <int kOperands, int kDims>
struct Layout {
  int ndim;
  Divider sizes[kDims]; // of all but the last dimension
  int64_t strides[kDims][kOperands];

  // Adds the offsets of element `index` of the dimensions from `dim` on; the last one needs no division.
  __device__ void add_offsets(int64_t index, int dim, int64_t (&offsets)[kOperands]) const {
    for (; dim < ndim; ++dim) {
      int64_t i = index;
      if (dim + 1 < ndim) {
        const auto divided = sizes[dim].divmod(static_cast<uint32_t>(index));
        index = divided.div;
        i = divided.mod;
      }
#pragma unroll
      for (int k = 0; k < kOperands; ++k) offsets[k] += i * strides[dim][k];
    }
  }
};

inline bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}

template <class Arguments>
void launch_kernel(c10::Device device, dim3 grid, void (*kernel)(Arguments), const Arguments& arguments) {
  const c10::cuda::CUDAGuard guard(device); // else a kernel for cuda:1 runs on cuda:0
  kernel<<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream(device.index())>>>(arguments);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

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

template <class Op, class T, bool kFlat>
struct MapArguments {
  using C = at::opmath_type<T>;
  static constexpr int kParameter = 1 + Op::tensors; // the operand that is the first parameter
  static constexpr int kOperands = kParameter + Op::parameters;

  int64_t vectors; // in all, and so threads
  int64_t row_length; // elements of dimension 0
  Layout<kOperands, kFlat ? 1 : kMaxDims> layout; // its dimension 0 counts vectors
  char* data[kOperands]; // null for a parameter that is a number
  int64_t element_strides[kOperands];
  bool aligned[kOperands]; // every vector of the operand is contiguous and aligned
  bool wide[kOperands]; // a parameter of type C, not T
  C numbers[Op::parameters + 1]; // + 1: an array must not be empty
};

template <class Op, int kLanes, class C, size_t... t, size_t... p>
__device__ C call(
    const C (&tensors)[Op::tensors][kLanes],
    const C (&parameters)[Op::parameters + 1][kLanes],
    int lane,
    std::index_sequence<t...>,
    std::index_sequence<p...>) {
  return Op::call(tensors[t][lane]..., parameters[p][lane]...);
}

// One vector a thread. kFlat: every tensor is contiguous and aligned, every parameter one number.
template <class Op, class T, bool kFlat>
__global__ void __launch_bounds__(kThreads) map_kernel(const MapArguments<Op, T, kFlat> a) {
  using C = at::opmath_type<T>;
  constexpr int kParameter = MapArguments<Op, T, kFlat>::kParameter, kOperands = MapArguments<Op, T, kFlat>::kOperands;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= a.vectors) return;

  int64_t column = index, offsets[kOperands] = {};
  if (!kFlat && a.layout.ndim > 1) {
    const auto divided = a.layout.sizes[0].divmod(static_cast<uint32_t>(index));
    column = divided.mod;
    a.layout.add_offsets(divided.div, 1, offsets);
  }
  const int64_t left = a.row_length - column * kLanes<T>;
  const int count = left < kLanes<T> ? static_cast<int>(left) : kLanes<T>;
#pragma unroll
  for (int k = 0; k < kOperands; ++k) offsets[k] += column * a.layout.strides[0][k];

  C tensors[Op::tensors][kLanes<T>];
#pragma unroll
  for (int k = 0; k < Op::tensors; ++k) {
    const bool whole = count == kLanes<T> && (kFlat || a.aligned[k + 1]);
    load<T>(tensors[k], a.data[k + 1] + offsets[k + 1], kFlat ? sizeof(T) : a.element_strides[k + 1], whole, count);
  }
  C parameters[Op::parameters + 1][kLanes<T>];
#pragma unroll
  for (int k = 0; k < Op::parameters; ++k) {
    const int operand = kParameter + k;
    const char* data = a.data[operand] + offsets[operand];
    const int64_t stride = kFlat ? 0 : a.element_strides[operand];
    if (a.data[operand] == nullptr) {
#pragma unroll
      for (int i = 0; i < kLanes<T>; ++i) parameters[k][i] = a.numbers[k];
    } else if (a.wide[operand]) {
#pragma unroll
      for (int i = 0; i < kLanes<T>; ++i)
        parameters[k][i] = *reinterpret_cast<const C*>(data + (i < count ? i : 0) * stride);
    } else {
      load<T>(parameters[k], data, stride, false, count);
    }
  }

  Vector<T> out;
#pragma unroll
  for (int i = 0; i < kLanes<T>; ++i) {
    out.lane[i] = static_cast<T>(call<Op>(
        tensors, parameters, i, std::make_index_sequence<Op::tensors>(), std::make_index_sequence<Op::parameters>()));
  }
  char* data = a.data[0] + offsets[0];
  if (count == kLanes<T> && (kFlat || a.aligned[0])) {
    *reinterpret_cast<Vector<T>*>(data) = out;
  } else {
    const int64_t stride = kFlat ? sizeof(T) : a.element_strides[0];
#pragma unroll
    for (int i = 0; i < kLanes<T>; ++i) {
      if (i < count) *reinterpret_cast<T*>(data + i * stride) = out.lane[i];
    }
  }
}

template <class Op>
struct MapLauncher {
  static void launch(at::TensorIteratorBase& iter, const Numbers& numbers) {
    for_each_plan(iter, [&](const Plan& plan) {
      dispatch<Op>(plan.operand[0].dtype, [&](auto zero) { launch<decltype(zero)>(plan, numbers); });
    });
  }

  template <class T>
  static void launch(const Plan& plan, const Numbers& numbers) {
    if (plan.numel == 0) return;
    if (is_flat<T>(plan)) {
      launch<T, true>(plan, numbers);
    } else {
      launch<T, false>(plan, numbers);
    }
  }

  // Whether all is one run: contiguous, aligned tensors, and parameters that are one number.
  template <class T>
  static bool is_flat(const Plan& plan) {
    bool flat = plan.ndim == 1;
    for (int k = 0; flat && k < plan.operands; ++k) {
      const auto& operand = plan.operand[k];
      flat = k > Op::tensors ? operand.strides[0] == 0 : operand.strides[0] == sizeof(T) && is_aligned(operand.data);
    }
    return flat;
  }

  template <class T, bool kFlat>
  static void launch(const Plan& plan, const Numbers& numbers) {
    using Arguments = MapArguments<Op, T, kFlat>;
    using C = typename Arguments::C;
    Arguments a{};
    a.row_length = plan.ndim == 0 ? 1 : plan.sizes[0];
    const int64_t row_vectors = (a.row_length + kLanes<T> - 1) / kLanes<T>;
    a.vectors = plan.numel / a.row_length * row_vectors;
    a.layout.ndim = plan.ndim;
    for (int d = 0; d + 1 < plan.ndim; ++d) {
      a.layout.sizes[d] = Divider(static_cast<uint32_t>(d == 0 ? row_vectors : plan.sizes[d]));
    }

    for (int k = 0, next = 0; k < Arguments::kOperands; ++k) {
      const int p = k - Arguments::kParameter; // k is parameter p, where that is not negative
      if (p >= 0 && numbers[p]) {
        a.numbers[p] = number_as<C>(*numbers[p]);
        continue;
      }
      const auto& operand = plan.operand[next++];
      a.data[k] = operand.data;
      a.wide[k] = operand.dtype == c10::CppTypeToScalarType<C>::value;
      a.element_strides[k] = plan.ndim == 0 ? 0 : operand.strides[0];
      a.aligned[k] = a.element_strides[k] == sizeof(T) && is_aligned(operand.data);
      for (int d = 0; d < plan.ndim; ++d) {
        a.layout.strides[d][k] = d == 0 ? a.element_strides[k] * kLanes<T> : operand.strides[d];
        a.aligned[k] &= a.layout.strides[d][k] % kVectorBytes == 0;
      }
    }

    const int64_t blocks = (a.vectors + kThreads - 1) / kThreads;
    launch_kernel(plan.device, dim3(blocks), &map_kernel<Op, T, kFlat>, a);
  }
};

template <class Op, class T>
struct SumArguments {
  static constexpr int kOperands = 1 + Op::tensors;

  int64_t channels, numel; // elements of one channel
  bool channels_fastest; // neighbours in memory are neighbouring channels
  int64_t row_bytes; // of the partial sums
  Layout<kOperands, kMaxDims> layout; // of one channel
  char* data[kOperands];
  int64_t channel_strides[kOperands];
};

// A block adds up its share (blockIdx.y) of one channel (blockIdx.x), or, where channels are the fastest dimension, of
// 32 of them. The order of every addition is fixed.
template <class Op, class T>
__global__ void __launch_bounds__(kThreads) sum_kernel(const SumArguments<Op, T> a) {
  using C = at::opmath_type<T>;
  constexpr int kOperands = SumArguments<Op, T>::kOperands;
  const int tile = a.channels_fastest ? 32 : 1; // channels of the block
  const int lane = threadIdx.x / tile, lanes = kThreads / tile; // of the threads that share a channel
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * tile + threadIdx.x % tile;
  const int64_t begin = a.numel * blockIdx.y / gridDim.y, end = a.numel * (blockIdx.y + 1) / gridDim.y;

  C sum{};
  for (int64_t i = begin + lane; channel < a.channels && i < end; i += lanes) {
    int64_t offsets[kOperands];
#pragma unroll
    for (int k = 0; k < kOperands; ++k) offsets[k] = channel * a.channel_strides[k];
    a.layout.add_offsets(i, 0, offsets);
    C tensors[Op::tensors][1], none[1][1];
#pragma unroll
    for (int k = 0; k < Op::tensors; ++k) {
      tensors[k][0] = static_cast<C>(*reinterpret_cast<const T*>(a.data[k + 1] + offsets[k + 1]));
    }
    sum += call<Op>(tensors, none, 0, std::make_index_sequence<Op::tensors>(), std::index_sequence<>());
  }

  __shared__ __align__(16) char memory[kThreads * sizeof(C)];
  C* sums = reinterpret_cast<C*>(memory);
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int half = kThreads / 2; half >= tile; half /= 2) {
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x < tile && channel < a.channels) {
    // += because the parts of a tensor that for_each_plan splits come one after the other
    *reinterpret_cast<C*>(a.data[0] + blockIdx.y * a.row_bytes + channel * a.channel_strides[0]) += sums[threadIdx.x];
  }
}

template <class Op>
struct SumLauncher {
  static void launch(at::TensorIteratorBase& iter, const Rows& rows) {
    for_each_plan(iter, [&](const Plan& plan) {
      dispatch<Op>(plan.operand[1].dtype, [&](auto zero) { launch<decltype(zero)>(plan, rows); });
    });
  }

  template <class T>
  static void launch(const Plan& plan, const Rows& rows) {
    using Arguments = SumArguments<Op, T>;
    if (plan.numel == 0) return;
    Arguments a{};
    a.channels = 1;
    a.row_bytes = rows.bytes;
    for (int k = 0; k < Arguments::kOperands; ++k) a.data[k] = plan.operand[k].data;
    for (int d = 0; d < plan.ndim; ++d) {
      const bool is_channel = plan.operand[0].strides[d] != 0; // the sums are expanded along every other dimension
      if (is_channel) {
        a.channels = plan.sizes[d];
        a.channels_fastest = d == 0;
      } else {
        // The last dimension divides nothing, and may not fit into the divider's 31 bits.
        if (plan.ndim > 1) a.layout.sizes[a.layout.ndim] = Divider(static_cast<uint32_t>(plan.sizes[d]));
      }
      for (int k = 0; k < Arguments::kOperands; ++k) {
        (is_channel ? a.channel_strides[k] : a.layout.strides[a.layout.ndim][k]) = plan.operand[k].strides[d];
      }
      a.layout.ndim += !is_channel;
    }
    a.numel = plan.numel / a.channels;

    const int64_t tiles = a.channels_fastest ? (a.channels + 31) / 32 : a.channels;
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(rows.count));
    launch_kernel(plan.device, grid, &sum_kernel<Op, T>, a);
  }
};

template <class Op>
using Launcher = std::conditional_t<Op::is_sum, SumLauncher<Op>, MapLauncher<Op>>;

} // namespace my_cuda_op::cuda
