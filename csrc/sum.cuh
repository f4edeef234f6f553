#pragma once
// Sums over everything but the channels, in one pass with what the op computes at each element.

#include "elementwise.cuh"

namespace my_cuda_op::cuda {

template <class Op, class T>
struct SumArguments {
  int64_t channels, items; // of one channel: vectors along it, or elements where vectors go across channels
  int64_t row_length; // elements of dimension 0, or channels
  int width; // vectors side by side in a block: a power of 2, at most 32
  char* sums;
  int64_t sum_stride, row_bytes, sum_bytes; // from channel to channel, row to row, sum to sum
  int64_t channel_strides[ops::operands<Op>]; // of a step along blockIdx.x: a channel, or a vector of them
  Operands<Op, T, kMaxDims> operands; // without the channels' dimension
};

template <class C>
__device__ C add_over_lanes(C value, int width) {
  constexpr int kWords = sizeof(C) / 4;
  for (int other = 16; other >= width; other /= 2) {
    C from = value;
    auto* words = reinterpret_cast<unsigned*>(&from);
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = __shfl_xor_sync(~0u, words[w], other);
    value += from;
  }
  return value;
}

// A block adds up its share (blockIdx.y) of one channel, or, with kAcross, of `width` vectors of channels that are
// neighbours in memory. The order of every addition is fixed.
template <class Op, class T, bool kAcross>
__global__ void __launch_bounds__(kThreads) sum_kernel(const SumArguments<Op, T> a) {
  using C = at::opmath_type<T>;
  constexpr int kSums = Op::sums, kChannels = kAcross ? kLanes<T> : 1, kWarps = kThreads / 32; // kChannels: a thread's
  const int width = kAcross ? a.width : 1;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * width + threadIdx.x % width;
  const int64_t begin = a.items * blockIdx.y / gridDim.y, end = a.items * (blockIdx.y + 1) / gridDim.y;
  const int64_t channels_left = a.channels - column * kChannels;

  C sums[kSums][kChannels] = {};
  if (channels_left > 0) {
    const int across = channels_left < kChannels ? static_cast<int>(channels_left) : kChannels;
    int64_t start[ops::operands<Op>];
#pragma unroll
    for (int k = 0; k < ops::operands<Op>; ++k) start[k] = column * a.channel_strides[k];
    C parameters[Op::parameters + 1][kLanes<T>];
    load_parameters(parameters, a.operands, start, kAcross ? across : kLanes<T>);
    for (int64_t i = begin + threadIdx.x / width; i < end; i += kThreads / width) {
      int64_t offsets[ops::operands<Op>];
#pragma unroll
      for (int k = 0; k < ops::operands<Op>; ++k) offsets[k] = start[k];
      const int64_t left = a.row_length - a.operands.add_offsets(i, offsets) * kLanes<T>;
      const int count = kAcross ? across : left < kLanes<T> ? static_cast<int>(left) : kLanes<T>;
      compute<false>(a.operands, offsets, parameters, count, [&](int lane, const auto& values) {
#pragma unroll
        for (int s = 0; s < kSums; ++s) sums[s][kAcross ? lane : 0] += values.value[Op::outputs + s];
      });
    }
  }

  // First the threads of a warp that share channels, then the warps.
  __shared__ __align__(16) char memory[kWarps * kSums * kChannels * (kAcross ? 32 : 1) * sizeof(C)];
  C* shared = reinterpret_cast<C*>(memory); // [warp][sum][channel of the thread][column of the block]
  const int count = kSums * kChannels * width;
#pragma unroll
  for (int s = 0; s < kSums; ++s) {
#pragma unroll
    for (int c = 0; c < kChannels; ++c) {
      const C sum = add_over_lanes(sums[s][c], width);
      if (threadIdx.x % 32 < width) {
        shared[threadIdx.x / 32 * count + (s * kChannels + c) * width + threadIdx.x % 32] = sum;
      }
    }
  }
  __syncthreads();
  for (int j = threadIdx.x; j < count; j += kThreads) {
    const int s = j / (kChannels * width), c = j / width % kChannels;
    const int64_t channel = (static_cast<int64_t>(blockIdx.x) * width + j % width) * kChannels + c;
    if (channel >= a.channels) continue;
    C sum = shared[j];
    for (int warp = 1; warp < kWarps; ++warp) sum += shared[warp * count + j];
    // += because the parts of a tensor that for_each_plan splits come one after the other
    *reinterpret_cast<C*>(a.sums + s * a.sum_bytes + blockIdx.y * a.row_bytes + channel * a.sum_stride) += sum;
  }
}

template <class Op>
struct SumLauncher {
  static void launch(at::TensorIteratorBase& iter, const Call& call) {
    for_each_plan(iter, [&](const Plan& plan) {
      dispatch<Op>(call.dtype, [&](auto zero) { launch<decltype(zero)>(plan, call); });
    });
  }

  template <class T>
  static void launch(const Plan& plan, const Call& call) {
    if (plan.numel == 0) return;
    int channel = -1; // the dimension; the sums are expanded along every other
    for (int d = 0; d < plan.ndim; ++d) {
      if (plan.operand[0].strides[d] != 0) channel = d;
    }
    const bool across = channel == 0;
    SumArguments<Op, T> a{
        .channels = channel < 0 ? 1 : plan.sizes[channel],
        .items = 1,
        .row_length = plan.ndim == 0 ? 1 : plan.sizes[0],
        .width = 1,
        .sums = plan.operand[0].data,
        .sum_stride = channel < 0 ? 0 : plan.operand[0].strides[channel],
        .row_bytes = call.row_bytes,
        .sum_bytes = call.sum_bytes,
        .channel_strides = {},
        .operands = {plan, call, 1}};
    for (int d = 0; d < plan.ndim; ++d) {
      if (d == channel) continue;
      const int64_t size = d == 0 ? (plan.sizes[0] + kLanes<T> - 1) / kLanes<T> : plan.sizes[d];
      a.operands.add_dimension(plan, call, 1, d, size, d == 0 ? kLanes<T> : 1);
      a.items *= size;
    }
    const int64_t columns = across ? (a.channels + kLanes<T> - 1) / kLanes<T> : a.channels;
    if (channel >= 0) {
      const int step = across ? kLanes<T> : 1;
      for (int k = 0, next = 1; k < ops::operands<Op>; ++k) {
        if (!call.present[k]) continue;
        a.channel_strides[k] = plan.operand[next++].strides[channel] * step;
        a.operands.aligned[k] &= a.channel_strides[k] % (k == Op::mask_operand ? kLanes<T> : kVectorBytes) == 0;
      }
    }
    while (across && a.width < 32 && a.width < columns) a.width *= 2;
    const dim3 grid(static_cast<unsigned>((columns + a.width - 1) / a.width), static_cast<unsigned>(call.rows));
    launch_kernel(plan.device, grid, across ? &sum_kernel<Op, T, true> : &sum_kernel<Op, T, false>, a);
  }
};

} // namespace my_cuda_op::cuda
