#pragma once
// The CPU's access patterns. TensorIterator orders and merges the dimensions and runs the loops on PyTorch's own
// threads: its for_each lives in libtorch, so it is parallel whatever flags this file is compiled with, and there is no
// second OpenMP runtime. What is left is a run of elements with a stride for each operand. Operands that are not
// contiguous are gathered into small buffers that stay in the first-level cache, and one plain loop, which the compiler
// vectorises, does the arithmetic.

#include <ATen/TensorIterator.h>
#include <ATen/ops/arange.h>

#include <algorithm>
#include <utility>

#include "dtypes.h"
#include "kernel.h"

// The compiler's baseline is SSE2; the loader picks the widest of these that the machine has.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define MULTIVERSIONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#else
#define MULTIVERSIONED
#define INDEPENDENT_ITERATIONS
#endif

namespace my_cuda_op::cpu {

constexpr int64_t kBlock = 256; // elements in a buffer

// The n elements of type T at data, as an array of Out: themselves where they are that already, else copied to the
// buffer.
template <class T, class Out>
const Out* gather(const char* data, int64_t stride, int64_t n, Out* buffer) {
  if (std::is_same_v<T, Out> && stride == sizeof(T)) return reinterpret_cast<const Out*>(data);
  for (int64_t i = 0; i < n; ++i) buffer[i] = static_cast<Out>(*reinterpret_cast<const T*>(data + i * stride));
  return buffer;
}

// A parameter that is the same number for the whole run, in the guise of an array.
template <class C>
struct Uniform {
  C value;
  C operator[](int64_t) const {
    return value;
  }
};

// TensorIterator's loop over two dimensions: calls f with the operands' pointers at each row.
template <class F>
void for_each_row(int operands, char** data, const int64_t* strides, int64_t rows, const F& f) {
  const int64_t* row_strides = strides + operands;
  for (int64_t j = 0; j < rows; ++j) {
    std::array<char*, kMaxOperands> row{};
    for (int k = 0; k < operands; ++k) row[k] = data[k] + j * row_strides[k];
    f(row.data());
  }
}

template <class Op>
struct MapLauncher {
  static constexpr auto kTensors = std::make_index_sequence<Op::tensors>();
  static constexpr auto kParameters = std::make_index_sequence<Op::parameters>();

  template <class T, class Parameter, size_t... t, size_t... p>
  MULTIVERSIONED static void compute(
      T* out,
      std::array<const T*, Op::tensors> in,
      std::array<Parameter, Op::parameters> parameters,
      int64_t n,
      std::index_sequence<t...>,
      std::index_sequence<p...>) {
    using C = at::opmath_type<T>;
    INDEPENDENT_ITERATIONS // in place, out is in[0]: each element meets itself only
        for (int64_t i = 0; i < n; ++i) out[i] =
            static_cast<T>(Op::call(static_cast<C>(in[t][i])..., C(parameters[p][i])...));
  }

  // One run: n elements, operand k's at data[k] with stride strides[k] (in bytes).
  template <class T>
  static void run(
      const at::TensorIteratorBase& iter, const Numbers& numbers, char** data, const int64_t* strides, int64_t n) {
    using C = at::opmath_type<T>;
    constexpr auto compute_dtype = c10::CppTypeToScalarType<C>::value;
    std::array<Uniform<C>, Op::parameters> uniform{};
    std::array<int, Op::parameters> operand{}; // of each parameter; 0, the output, for a number
    bool all_uniform = true;
    for (int p = 0, next = Op::tensors + 1; p < Op::parameters; ++p) {
      if (numbers[p]) {
        uniform[p].value = number_as<C>(*numbers[p]);
      } else {
        operand[p] = next++;
        all_uniform &= strides[operand[p]] == 0;
        C first;
        uniform[p].value = iter.dtype(operand[p]) == compute_dtype ? *gather<C>(data[operand[p]], 0, 1, &first)
                                                                   : *gather<T>(data[operand[p]], 0, 1, &first);
      }
    }
    bool contiguous = true;
    for (int k = 0; k <= Op::tensors; ++k) contiguous &= strides[k] == sizeof(T);

    const int64_t step = contiguous && all_uniform ? n : kBlock;
    for (int64_t i = 0; i < n; i += step) {
      const int64_t count = std::min(step, n - i);
      T tensor_buffers[Op::tensors][kBlock], out_buffer[kBlock];
      std::array<const T*, Op::tensors> in;
      for (int t = 0; t < Op::tensors; ++t) {
        in[t] = gather<T>(data[t + 1] + i * strides[t + 1], strides[t + 1], count, tensor_buffers[t]);
      }
      char* out_data = data[0] + i * strides[0];
      T* out = strides[0] == sizeof(T) ? reinterpret_cast<T*>(out_data) : out_buffer;
      if (all_uniform) {
        compute(out, in, uniform, count, kTensors, kParameters);
      } else {
        C parameter_buffers[Op::parameters + 1][kBlock]; // + 1: an array must not be empty
        std::array<const C*, Op::parameters> parameters;
        for (int p = 0; p < Op::parameters; ++p) {
          parameters[p] = parameter_buffers[p];
          const int64_t stride = strides[operand[p]];
          if (operand[p] == 0 || stride == 0) {
            std::fill_n(parameter_buffers[p], count, uniform[p].value);
          } else if (iter.dtype(operand[p]) == compute_dtype) {
            parameters[p] = gather<C>(data[operand[p]] + i * stride, stride, count, parameter_buffers[p]);
          } else {
            parameters[p] = gather<T>(data[operand[p]] + i * stride, stride, count, parameter_buffers[p]);
          }
        }
        compute(out, in, parameters, count, kTensors, kParameters);
      }
      if (out == out_buffer) {
        for (int64_t j = 0; j < count; ++j) *reinterpret_cast<T*>(out_data + j * strides[0]) = out_buffer[j];
      }
    }
  }

  static void launch(at::TensorIteratorBase& iter, const Numbers& numbers) {
    dispatch<Op>(iter.dtype(0), [&](auto zero) {
      iter.for_each([&](char** data, const int64_t* strides, int64_t size0, int64_t size1) {
        for_each_row(iter.ntensors(), data, strides, size1, [&](char** row) {
          run<decltype(zero)>(iter, numbers, row, strides, size0);
        });
      });
    });
  }
};

template <class Op>
struct SumLauncher {
  static constexpr auto kTensors = std::make_index_sequence<Op::tensors>();
  static constexpr int kLanes = 16; // independent sums, since the compiler may not reorder one

  template <class T, class C, size_t... t>
  MULTIVERSIONED static C total(std::array<const T*, Op::tensors> in, int64_t n, std::index_sequence<t...>) {
    C lanes[kLanes] = {}, sum{};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (int k = 0; k < kLanes; ++k) lanes[k] += Op::call(static_cast<C>(in[t][i + k])...);
    }
    for (; i < n; ++i) sum += Op::call(static_cast<C>(in[t][i])...);
    for (int k = 0; k < kLanes; ++k) sum += lanes[k];
    return sum;
  }

  template <class T, class C, size_t... t>
  MULTIVERSIONED static void add_each(
      C* sums, std::array<const T*, Op::tensors> in, int64_t n, std::index_sequence<t...>) {
    INDEPENDENT_ITERATIONS
    for (int64_t i = 0; i < n; ++i) sums[i] += Op::call(static_cast<C>(in[t][i])...);
  }

  template <class T>
  static void run(char** data, const int64_t* strides, int64_t n) {
    using C = at::opmath_type<T>;
    for (int64_t i = 0; i < n; i += kBlock) {
      const int64_t count = std::min(kBlock, n - i);
      T buffers[Op::tensors][kBlock];
      std::array<const T*, Op::tensors> in;
      for (int t = 0; t < Op::tensors; ++t) {
        in[t] = gather<T>(data[t + 1] + i * strides[t + 1], strides[t + 1], count, buffers[t]);
      }
      C* sums = reinterpret_cast<C*>(data[0] + i * strides[0]);
      if (strides[0] == 0) { // the run lies in one channel
        *sums += total<T, C>(in, count, kTensors);
      } else { // the run goes through the channels
        TORCH_INTERNAL_ASSERT_DEBUG_ONLY(strides[0] == sizeof(C));
        add_each<T, C>(sums, in, count, kTensors);
      }
    }
  }

  // Row r of the partial sums takes the r-th share of the elements.
  static void launch(at::TensorIteratorBase& iter, const Rows& rows) {
    dispatch<Op>(iter.dtype(1), [&](auto zero) {
      auto add_up = [&](int64_t r) {
        auto loop = [&](char** data, const int64_t* strides, int64_t size0, int64_t size1) {
          for_each_row(iter.ntensors(), data, strides, size1, [&](char** row) {
            row[0] += r * rows.bytes;
            run<decltype(zero)>(row, strides, size0);
          });
        };
        const int64_t begin = r * iter.numel() / rows.count, end = (r + 1) * iter.numel() / rows.count;
        iter.serial_for_each(loop, {begin, end});
      };
      // An iterator over the numbers of the rows, one to a thread at a time: PyTorch's threads again.
      at::Tensor numbers = at::arange(rows.count);
      at::TensorIterator::borrowing_nullary_op(numbers).for_each(
          [&](char** data, const int64_t* strides, int64_t n, int64_t) {
            for (int64_t i = 0; i < n; ++i) add_up(*reinterpret_cast<int64_t*>(data[0] + i * strides[0]));
          },
          /*grain_size=*/1);
    });
  }
};

template <class Op>
using Launcher = std::conditional_t<Op::is_sum, SumLauncher<Op>, MapLauncher<Op>>;

} // namespace my_cuda_op::cpu
