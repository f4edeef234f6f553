#pragma once
// One vector a thread: every op that computes each element by itself.

#include "elementwise.cuh"

namespace my_cuda_op::cuda {

template <class Op, class T, Access kAccess>
struct MapArguments {
  int64_t vectors; // in all, and so threads
  int64_t row_length; // elements of dimension 0
  Operands<Op, T> operands;
  Layout<Op, T, kAccess> layout;
};

template <class Op, class T, Access kLayout, bool kMask>
__global__ void __launch_bounds__(kThreads) map_kernel(const MapArguments<Op, T, kLayout> a) {
  constexpr Access kAccess = kLayout == Access::kTiles ? Access::kAny : kLayout;
  int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if constexpr (kLayout == Access::kTiles) index = a.layout.item();
  unsigned bits = 0; // of the mask that is written
  if (index < a.vectors) {
    int64_t offsets[ops::operands<Op>] = {};
    const int64_t column = a.layout.add_offsets(index, offsets);
    int count = kLanes<T>;
    if (!is_whole<kAccess>) {
      const int64_t left = a.row_length - column * kLanes<T>;
      if (left < kLanes<T>) count = static_cast<int>(left);
    }
    const auto tensors = load_tensors<kAccess>(a.operands, offsets, count); // first, because it takes longest
    auto parameters = load_parameters<kAccess>(a.operands, offsets, count);
    spread<kAccess>(parameters, a.operands);
    bits = compute<kAccess, kMask>(a.operands, offsets, tensors, parameters, count, [](int, const auto&) {});
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
    const int64_t row_length = plan.ndim == 0 ? 1 : plan.sizes[0];
    const int64_t count = plan.numel / row_length * vectors<T>(row_length);
    Operands<Op, T> operands(plan, call, 0);
    if (is_flat<T>(plan, call)) {
      launch(plan, call, MapArguments<Op, T, Access::kFlat>{count, row_length, operands, {}});
      return;
    }
    // The other types are not worth the code.
    if constexpr (std::is_floating_point_v<at::opmath_type<T>>) {
      if (1 <= plan.ndim && plan.ndim <= Layout<Op, T, Access::kRows>::kDims) {
        auto of_rows = operands;
        const auto rows = layout<T, Access::kRows>(plan, call, of_rows);
        if (rows.suits(of_rows, row_length)) {
          if constexpr (Op::parameters > 0) {
            if (launch_channels<T, Access::kChannels>(plan, call, {count, row_length, of_rows, rows})) return;
            if (launch_channels<T, Access::kAcross>(plan, call, {count, row_length, of_rows, rows})) return;
            if constexpr (!std::is_same_v<T, at::opmath_type<T>>) {
              if (launch_channels<T, Access::kAcrossWide>(plan, call, {count, row_length, of_rows, rows})) return;
            }
          }
          launch(plan, call, MapArguments<Op, T, Access::kRows>{count, row_length, of_rows, rows});
          return;
        }
      }
    }
    const auto any = layout<T, Access::kAny>(plan, call, operands);
    if constexpr (std::is_floating_point_v<at::opmath_type<T>>) {
      if (suits_tiles<T>(plan, call, operands)) {
        const MapArguments<Op, T, Access::kTiles> tiles{count, row_length, operands, {any, plan, count}};
        launch_kernel(plan.device, dim3(tiles.layout.blocks()), &map_kernel<Op, T, Access::kTiles, false>, tiles);
        return;
      }
    }
    launch(plan, call, MapArguments<Op, T, Access::kAny>{count, row_length, operands, any});
  }

  // Is a tensor contiguous along dimension 1, as a transposed one is? (A mask is written in the order of kAny.)
  template <class T>
  static bool suits_tiles(const Plan& plan, const Call& call, const Operands<Op, T>& operands) {
    constexpr int kFew = 4; // vectors of a row, with which most of a tile is empty
    if (plan.ndim < 2 || vectors<T>(plan.sizes[0]) < kFew || plan.sizes[1] < 16) return false;
    if (Op::writes_mask && call.mask != nullptr) return false;
    bool suits = false;
    for (int k = 0, next = 0; k < Op::first_parameter; ++k) {
      if (!call.present[k]) continue;
      const auto* strides = plan.operand[next++].strides;
      suits |= operands.kind[k] == Kind::kStrided && strides[0] != sizeof(T) && strides[1] == sizeof(T);
    }
    return suits;
  }

  // The same as kRows, if that is possible.
  template <class T, Access kAccess>
  static bool launch_channels(const Plan& plan, const Call& call, const MapArguments<Op, T, Access::kRows>& rows) {
    const auto layout = Layout<Op, T, kAccess>::make(rows.operands, rows.layout, plan);
    if (!layout) return false;
    launch(plan, call, MapArguments<Op, T, kAccess>{rows.vectors, rows.row_length, rows.operands, {*layout}});
    return true;
  }

  // Whether all is one run: contiguous, aligned tensors, and parameters that are one number.
  template <class T>
  static bool is_flat(const Plan& plan, const Call& call) {
    bool flat = plan.ndim == 1;
    for (int k = 0, next = 0; flat && k < ops::operands<Op>; ++k) {
      if (!call.present[k]) continue;
      const auto& operand = plan.operand[next++];
      const size_t stride = Operands<Op, T>::is_parameter(k) ? 0 : k == Op::mask_operand ? 1 : sizeof(T);
      flat = operand.strides[0] == static_cast<int64_t>(stride) && (stride < sizeof(T) || is_aligned(operand.data));
    }
    return flat;
  }

  template <class T, Access kAccess>
  static Layout<Op, T, kAccess> layout(const Plan& plan, const Call& call, Operands<Op, T>& operands) {
    Layout<Op, T, kAccess> layout(plan);
    for (int d = 0; d < plan.ndim; ++d) {
      const int64_t size = d == 0 ? vectors<T>(plan.sizes[0]) : plan.sizes[d];
      layout.add_dimension(operands, plan, call, 0, d, size, d == 0 ? kLanes<T> : 1);
    }
    return layout;
  }

  template <class T, Access kAccess>
  static void launch(const Plan& plan, const Call& call, const MapArguments<Op, T, kAccess>& a) {
    const int64_t blocks = (a.vectors + kThreads - 1) / kThreads;
    if (Op::writes_mask && call.mask != nullptr) {
      launch_kernel(plan.device, dim3(blocks), &map_kernel<Op, T, kAccess, Op::writes_mask>, a);
    } else {
      launch_kernel(plan.device, dim3(blocks), &map_kernel<Op, T, kAccess, false>, a);
    }
  }
};

} // namespace my_cuda_op::cuda
