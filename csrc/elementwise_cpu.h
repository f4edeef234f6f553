#pragma once
// The CPU's access patterns. TensorIterator orders and merges the dimensions and runs the loops on PyTorch's own
// threads: its for_each lives in libtorch, so it is parallel whatever flags this file is compiled with, and there is no
// second OpenMP runtime. What is left is a run of elements with a stride for each operand.

#include <ATen/ops/from_blob.h>

#include <vector>

#include "runs_cpu.h"

namespace my_cuda_op::cpu {

// Calls f(pointers, elements, period) for each row, or once, if the rows are one run (see Runs).
template <class Runs, class F>
void for_each_row(
    const Runs& runs, int operands, char** data, const int64_t* row_strides, int64_t length, int64_t rows, const F& f) {
  if (rows > 1 && runs.are_one_run(row_strides, length)) return f(data, length * rows, length);
  for (int64_t j = 0; j < rows; ++j) {
    std::array<char*, kMaxOperands> row{};
    for (int k = 0; k < operands; ++k) row[k] = data[k] + j * row_strides[k];
    f(row.data(), length, 0);
  }
}

// Calls f(begin, end) for parts of [0, n): an iterator over n bytes, which nothing touches, shares them out.
template <class F>
void parallel_for(void* bytes, int64_t n, int64_t grain_size, const F& f) {
  if (n <= grain_size) return f(0, n);
  at::Tensor indices = at::from_blob(bytes, {n}, at::kByte);
  at::TensorIterator::borrowing_nullary_op(indices).for_each(
      [&](char** data, const int64_t*, int64_t count, int64_t) {
        const int64_t begin = data[0] - static_cast<char*>(bytes);
        f(begin, begin + count);
      },
      grain_size);
}

template <class Op>
struct MapLauncher {
  static void launch(at::TensorIteratorBase& iter, const Call& call) {
    dispatch<Op>(call.dtype, [&](auto zero) {
      using T = decltype(zero);
      const char* output = static_cast<const char*>(iter.data_ptr(0));
      const auto loop = [&](char** data, const int64_t* strides, int64_t size0, int64_t size1) {
        Runs<Op, T> runs(iter, call, strides);
        const auto run = [&](char** row, int64_t n, int64_t period) {
          uint8_t* mask = call.mask;
          if (Op::writes_mask && mask != nullptr) mask += (row[0] - output) / sizeof(T) / 8;
          runs(row, n, period, nullptr, 0, Op::writes_mask ? mask : nullptr);
        };
        for_each_row(runs, iter.ntensors(), data, strides + iter.ntensors(), size0, size1, run);
      };
      if (!Op::writes_mask || call.mask == nullptr) return iter.for_each(loop);
      // In whole bytes of the mask: two threads that write into one would undo each other's bits.
      const int64_t numel = iter.numel(), bytes = (numel + 7) / 8;
      std::fill(call.mask + bytes, call.mask + (numel + 31) / 32 * 4, 0);
      parallel_for(call.mask, bytes, at::internal::GRAIN_SIZE / 8, [&](int64_t begin, int64_t end) {
        iter.serial_for_each(loop, {8 * begin, std::min(8 * end, numel)});
      });
    });
  }
};

constexpr int64_t kShort = 6; // elements of a row, such as few channels

template <class Op>
struct SumLauncher {
  // Row r of the partial sums takes the r-th share of the elements.
  static void launch(at::TensorIteratorBase& iter, const Call& call) {
    dispatch<Op>(call.dtype, [&](auto zero) {
      const auto add_up = [&](int64_t r) {
        const auto loop = [&](char** data, const int64_t* strides, int64_t size0, int64_t size1) {
          const int64_t* row_strides = strides + iter.ntensors();
          if (size0 < kShort && size0 < size1) { // what a run costs beside its elements: go along the columns
            std::swap(strides, row_strides);
            std::swap(size0, size1);
          }
          Runs<Op, decltype(zero)> runs(iter, call, strides);
          const auto run = [&](char** row, int64_t n, int64_t period) {
            runs(row, n, period, row[0] + r * call.row_bytes, strides[0]);
          };
          for_each_row(runs, iter.ntensors(), data, row_strides, size0, size1, run);
        };
        char* row = call.sums + r * call.row_bytes;
        for (int s = 0; s < Op::sums; ++s) std::memset(row + s * call.sum_bytes, 0, call.row_bytes);
        const int64_t begin = r * iter.numel() / call.rows, end = (r + 1) * iter.numel() / call.rows;
        iter.serial_for_each(loop, {begin, end});
      };
      parallel_for(call.sums, call.rows, /*grain_size=*/1, [&](int64_t begin, int64_t end) {
        for (int64_t r = begin; r < end; ++r) add_up(r);
      });
      for (int s = 0; s < Op::sums; ++s) {
        add_rows<decltype(zero)>(call.sums + s * call.sum_bytes, call, call.totals[s]);
      }
    });
  }

  template <class T>
  static void add_rows(const char* sums, const Call& call, const Call::Total& total) {
    using C = at::opmath_type<T>;
    const int64_t channels = call.row_bytes / sizeof(C), count = total.one ? 1 : channels;
    using Wide = std::conditional_t<ops::is_complex<C>, c10::complex<double>, double>; // there may be many rows
    std::vector<Wide> sum(count);
    for (int64_t r = 0; r < call.rows; ++r) {
      const C* row = reinterpret_cast<const C*>(sums + r * call.row_bytes);
      for (int64_t c = 0; c < channels; ++c) sum[total.one ? 0 : c] += static_cast<Wide>(row[c]);
    }
    for (int64_t c = 0; c < count; ++c) {
      if (total.wide) {
        static_cast<C*>(total.data)[c] = static_cast<C>(sum[c]);
      } else {
        static_cast<T*>(total.data)[c] = static_cast<T>(static_cast<C>(sum[c]));
      }
    }
  }
};

template <class Op>
using Launcher = std::conditional_t<(Op::sums > 0), SumLauncher<Op>, MapLauncher<Op>>;

} // namespace my_cuda_op::cpu
