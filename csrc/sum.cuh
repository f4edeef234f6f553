#pragma once
// Sums over everything but the channels, in one pass with what the op computes at each element.

#include "elementwise.cuh"

namespace my_cuda_op::cuda {

template <class Op, class T, Access kAccess, bool kAcross>
struct SumArguments {
  int64_t channels, items; // of one channel: vectors along it, or elements where vectors go across channels
  int64_t row_length; // elements of dimension 0, or channels
  int width; // vectors side by side in a block: a power of 2, at most 32
  int step; // items that a block takes at once
  bool add; // to what the sums are already: the parts that for_each_plan splits work into come one after the other
  char* sums;
  int64_t sum_stride, row_bytes, sum_bytes; // from channel to channel, row to row, sum to sum
  int64_t channel_strides[ops::operands<Op>]; // of a step along blockIdx.x: a channel, or a vector of them
  Operands<Op, T> operands;
  // Without the channels' dimension. Two others are as many as all but kAny need here: batch and image.
  Layout<Op, T, kAccess, kAccess == Access::kAny ? kMaxDims : kAcross ? 1 : 2> layout;
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
template <class Op, class T, Access kAccess, bool kAcross>
__global__ void __launch_bounds__(kThreads) sum_kernel(const SumArguments<Op, T, kAccess, kAcross> a) {
  using C = at::opmath_type<T>;
  // The next vector is loaded before this one is added, where so many lanes have sums of their own that the registers
  // leave room for few threads.
  constexpr bool kAhead = kAccess == Access::kAlike && kAcross && kLanes<T> >= 8;
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
    auto parameters = load_parameters<kAccess>(a.operands, start, kAcross ? across : kLanes<T>);
    spread<kAccess>(parameters, a.operands);
    struct Item {
      int64_t offsets[ops::operands<Op>];
      Tensors<Op> tensors;
      int count;
    };
    const auto load_item = [&](int64_t i) {
      Item item;
#pragma unroll
      for (int k = 0; k < ops::operands<Op>; ++k) item.offsets[k] = start[k];
      const int64_t left = a.row_length - a.layout.add_offsets(i, item.offsets) * kLanes<T>;
      item.count = kAcross ? across : left < kLanes<T> ? static_cast<int>(left) : kLanes<T>;
      item.tensors = load_tensors<kAccess>(a.operands, item.offsets, item.count);
      return item;
    };
    int64_t i = begin + threadIdx.x / width;
    Item next;
    if (kAhead && i < end) next = load_item(i);
    for (; i < end; i += a.step) {
      const Item item = kAhead ? next : load_item(i);
      if (kAhead && i + a.step < end) next = load_item(i + a.step);
      compute<kAccess, false>(
          a.operands, item.offsets, item.tensors, parameters, item.count, [&](int lane, const auto& values) {
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
    C* at = reinterpret_cast<C*>(a.sums + s * a.sum_bytes + blockIdx.y * a.row_bytes + channel * a.sum_stride);
    *at = a.add ? *at + sum : sum;
  }
}

template <class C>
struct TotalArguments {
  int64_t channels, rows, row_bytes, sum_bytes;
  const char* sums;
  Call::Total totals[2];
};

// Adds up the rows: a block has `kWidth` channels of sums number blockIdx.y.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) total_kernel(const TotalArguments<at::opmath_type<T>> a) {
  using C = at::opmath_type<T>;
  constexpr int kParts = kThreads / kWidth;
  const auto& total = a.totals[blockIdx.y];
  const int column = threadIdx.x % kWidth, part = threadIdx.x / kWidth;
  const int64_t channel = static_cast<int64_t>(blockIdx.x) * kWidth + column;
  C sum{};
  if (total.data != nullptr && channel < a.channels) {
    const char* sums = a.sums + blockIdx.y * a.sum_bytes + channel * sizeof(C);
#pragma unroll 8
    for (int64_t r = part; r < a.rows; r += kParts) sum += *reinterpret_cast<const C*>(sums + r * a.row_bytes);
  }
  __shared__ __align__(16) char memory[kThreads * sizeof(C)];
  C* shared = reinterpret_cast<C*>(memory);
  shared[threadIdx.x] = sum;
  for (int parts = kParts / 2; parts > 0; parts /= 2) {
    __syncthreads();
    if (part < parts) shared[threadIdx.x] += shared[threadIdx.x + parts * kWidth];
  }
  if (part > 0 || total.data == nullptr || channel >= a.channels) return;
  if (total.wide) {
    static_cast<C*>(total.data)[channel] = shared[threadIdx.x];
  } else {
    static_cast<T*>(total.data)[channel] = static_cast<T>(shared[threadIdx.x]);
  }
}

template <class Op>
struct SumLauncher {
  static void launch(at::TensorIteratorBase& iter, const Call& call) {
    c10::Device device = c10::kCUDA;
    for_each_plan(iter, [&](const Plan& plan) {
      device = plan.device;
      dispatch<Op>(call.dtype, [&](auto zero) { launch<decltype(zero)>(plan, call); });
    });
    dispatch<Op>(call.dtype, [&](auto zero) {
      launch_totals<decltype(zero)>(device, call, /*one=*/false);
      launch_totals<decltype(zero)>(device, call, /*one=*/true);
    });
  }

  // Of those totals that are one number for all channels, or of the others.
  template <class T>
  static void launch_totals(c10::Device device, const Call& call, bool one) {
    using C = at::opmath_type<T>;
    const int64_t channels = call.row_bytes / sizeof(C);
    TotalArguments<C> a{channels, call.rows, call.row_bytes, call.sum_bytes, call.sums, {}};
    if (one || channels == 1) a = {1, call.rows * channels, sizeof(C), call.sum_bytes, call.sums, {}};
    bool any = false;
    for (int s = 0; s < Op::sums; ++s) {
      if (call.totals[s].data == nullptr || (call.totals[s].one && channels > 1) != one) continue;
      a.totals[s] = call.totals[s];
      any = true;
    }
    if (!any || a.channels == 0) return;
    constexpr int kWidth = 8;
    if (a.channels == 1) {
      launch_kernel(device, dim3(1, Op::sums), &total_kernel<T, 1>, a);
    } else {
      const auto blocks = static_cast<unsigned>((a.channels + kWidth - 1) / kWidth);
      launch_kernel(device, dim3(blocks, Op::sums), &total_kernel<T, kWidth>, a);
    }
  }

  template <class T>
  static void launch(const Plan& plan, const Call& call) {
    if (plan.numel == 0) return;
    int channel = -1; // the dimension; the sums are expanded along every other
    for (int d = 0; d < plan.ndim; ++d) {
      if (plan.operand[0].strides[d] != 0) channel = d;
    }
    if (channel == 0) {
      launch<T, true>(plan, call, channel);
    } else {
      launch<T, false>(plan, call, channel);
    }
  }

  // kAcross: vectors go across the channels, else along one.
  template <class T, bool kAcross>
  static void launch(const Plan& plan, const Call& call, int channel) {
    if constexpr (std::is_floating_point_v<at::opmath_type<T>>) {
      using Whole = decltype(SumArguments<Op, T, Access::kWhole, kAcross>::layout);
      if (1 <= plan.ndim && plan.ndim - (channel >= 0) <= Whole::kDims) {
        const auto a = arguments<T, Access::kWhole, kAcross>(plan, call, channel);
        if (a.layout.suits(a.operands, a.row_length)) {
          are_alike<T>(a) ? launch(plan, call, arguments<T, Access::kAlike, kAcross>(plan, call, channel))
                          : launch(plan, call, a);
          return;
        }
      }
    }
    launch(plan, call, arguments<T, Access::kAny, kAcross>(plan, call, channel));
  }

  template <class T, bool kAcross>
  static bool are_alike(const SumArguments<Op, T, Access::kWhole, kAcross>& a) {
    bool alike = true;
    for (int k = 0; k < ops::operands<Op>; ++k) {
      if (a.operands.kind[k] == Kind::kAbsent || Operands<Op, T>::is_parameter(k)) continue;
      const int64_t unit = k == Op::mask_operand ? sizeof(T) : 1;
      alike &= a.channel_strides[k] * unit == a.channel_strides[Op::first_tensor];
      for (const auto& strides : a.layout.strides) alike &= strides[k] * unit == strides[Op::first_tensor];
    }
    return alike;
  }

  template <class T, Access kAccess, bool kAcross>
  static SumArguments<Op, T, kAccess, kAcross> arguments(const Plan& plan, const Call& call, int channel) {
    using Arguments = SumArguments<Op, T, kAccess, kAcross>;
    Arguments a{
        .channels = channel < 0 ? 1 : plan.sizes[channel],
        .items = 1,
        .row_length = plan.ndim == 0 ? 1 : plan.sizes[0],
        .width = 1,
        .step = kThreads,
        .add = call.sums_are_zero,
        .sums = plan.operand[0].data,
        .sum_stride = channel < 0 ? 0 : plan.operand[0].strides[channel],
        .row_bytes = call.row_bytes,
        .sum_bytes = call.sum_bytes,
        .channel_strides = {},
        .operands = {plan, call, 1},
        .layout = decltype(Arguments::layout)(plan)};
    for (int d = 0; d < plan.ndim; ++d) {
      if (d == channel) continue;
      const int64_t size = d == 0 ? vectors<T>(plan.sizes[0]) : plan.sizes[d];
      a.layout.add_dimension(a.operands, plan, call, 1, d, size, d == 0 ? kLanes<T> : 1);
      a.items *= size;
    }
    if (channel >= 0) {
      const int step = kAcross ? kLanes<T> : 1;
      for (int k = 0, next = 1; k < ops::operands<Op>; ++k) {
        if (!call.present[k]) continue;
        a.channel_strides[k] = plan.operand[next++].strides[channel] * step;
        a.operands.may_step(k, a.channel_strides[k]);
      }
    }
    while (kAcross && a.width < 32 && a.width < vectors<T>(a.channels)) a.width *= 2;
    a.step = kThreads / a.width;
    return a;
  }

  template <class T, Access kAccess, bool kAcross>
  static void launch(const Plan& plan, const Call& call, const SumArguments<Op, T, kAccess, kAcross>& a) {
    const int64_t columns = kAcross ? vectors<T>(a.channels) : a.channels;
    const dim3 grid(static_cast<unsigned>((columns + a.width - 1) / a.width), static_cast<unsigned>(call.rows));
    launch_kernel(plan.device, grid, &sum_kernel<Op, T, kAccess, kAcross>, a);
  }
};

} // namespace my_cuda_op::cuda
