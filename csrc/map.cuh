#pragma once
// One vector a thread: every op that computes each element by itself.

#include "elementwise.cuh"

namespace my_cuda_op::cuda {

template <class Op, class T, bool kFlat>
struct MapArguments {
  int64_t vectors; // in all, and so threads
  int64_t row_length; // elements of dimension 0
  Operands<Op, T, kFlat ? 1 : kMaxDims> operands; // their dimension 0 counts vectors
};

// kFlat: every tensor is contiguous and aligned, every parameter one number. kMask: writes the mask.
template <class Op, class T, bool kFlat, bool kMask>
__global__ void __launch_bounds__(kThreads) map_kernel(const MapArguments<Op, T, kFlat> a) {
  using C = at::opmath_type<T>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  unsigned bits = 0; // of the mask that is written
  if (index < a.vectors) {
    int64_t offsets[ops::operands<Op>] = {};
    int64_t column = index;
    if constexpr (kFlat) {
#pragma unroll
      for (int k = 0; k < Op::first_parameter; ++k) offsets[k] = index * kVectorBytes;
      if (Op::reads_mask) offsets[ops::operands<Op> - 1] = index * kLanes<T>;
    } else {
      column = a.operands.add_offsets(index, offsets);
    }
    const int64_t left = a.row_length - column * kLanes<T>;
    const int count = left < kLanes<T> ? static_cast<int>(left) : kLanes<T>;
    C parameters[Op::parameters + 1][kLanes<T>];
    load_parameters(parameters, a.operands, offsets, count);
    compute<kFlat>(a.operands, offsets, parameters, count, [&](int lane, const auto& values) {
      if constexpr (kMask) bits |= Op::keeps(static_cast<C>(static_cast<T>(values.value[0]))) << lane; // as rounded
    });
  }
  if constexpr (kMask) {
    // Neighbouring threads have neighbouring vectors: together they fill a word.
    constexpr int kSharers = 32 / kLanes<T>;
    const int part = threadIdx.x % kSharers;
    bits <<= part * kLanes<T>;
#pragma unroll
    for (int other = 1; other < kSharers; other *= 2) bits |= __shfl_xor_sync(~0u, bits, other);
    if (part == 0 && index < a.vectors) a.operands.mask[index / kSharers] = bits;
  }
}

template <class Op>
struct MapLauncher {
  static void launch(at::TensorIteratorBase& iter, const Call& call) {
    for_each_plan(iter, [&](const Plan& plan) {
      dispatch<Op>(call.dtype, [&](auto zero) { launch<decltype(zero)>(plan, call); });
    });
  }

  template <class T>
  static void launch(const Plan& plan, const Call& call) {
    if (plan.numel == 0) return;
    if (is_flat<T>(plan, call)) {
      launch<T, true>(plan, call);
    } else {
      launch<T, false>(plan, call);
    }
  }

  // Whether all is one run: contiguous, aligned tensors, and parameters that are one number.
  template <class T>
  static bool is_flat(const Plan& plan, const Call& call) {
    bool flat = plan.ndim == 1;
    for (int k = 0, next = 0; flat && k < ops::operands<Op>; ++k) {
      if (!call.present[k]) continue;
      const auto& operand = plan.operand[next++];
      const bool is_parameter = Op::first_parameter <= k && k < Op::mask_operand;
      const size_t stride = is_parameter ? 0 : k == Op::mask_operand ? 1 : sizeof(T);
      flat = operand.strides[0] == static_cast<int64_t>(stride) && (stride < sizeof(T) || is_aligned(operand.data));
    }
    return flat;
  }

  template <class T, bool kFlat>
  static void launch(const Plan& plan, const Call& call) {
    const int64_t row_length = plan.ndim == 0 ? 1 : plan.sizes[0];
    const int64_t row_vectors = (row_length + kLanes<T> - 1) / kLanes<T>;
    MapArguments<Op, T, kFlat> a{plan.numel / row_length * row_vectors, row_length, {plan, call, 0}};
    if (!kFlat) {
      for (int d = 0; d < plan.ndim; ++d) {
        a.operands.add_dimension(plan, call, 0, d, d == 0 ? row_vectors : plan.sizes[d], d == 0 ? kLanes<T> : 1);
      }
    }
    const int64_t blocks = (a.vectors + kThreads - 1) / kThreads;
    if (Op::writes_mask && call.mask != nullptr) {
      launch_kernel(plan.device, dim3(blocks), &map_kernel<Op, T, kFlat, Op::writes_mask>, a);
    } else {
      launch_kernel(plan.device, dim3(blocks), &map_kernel<Op, T, kFlat, false>, a);
    }
  }
};

} // namespace my_cuda_op::cuda
