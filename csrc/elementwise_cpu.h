#pragma once
// The CPU's access patterns. TensorIterator orders and merges the dimensions and runs the loops on PyTorch's own
// threads: its for_each lives in libtorch, so it is parallel whatever flags this file is compiled with, and there is no
// second OpenMP runtime. What is left is a run of elements with a stride for each operand. Operands that are not
// contiguous are gathered into small buffers that stay in the first-level cache, and one plain loop, which the compiler
// vectorises, does the arithmetic.

#include <ATen/TensorIterator.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

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

// The bits of n elements, `stride` apart, from that number `first` on, as an array of bools.
inline const bool* gather_bits(const uint8_t* mask, int64_t first, int64_t stride, int64_t n, bool* buffer) {
  for (int64_t i = 0; i < n; ++i) {
    const int64_t bit = first + i * stride;
    buffer[i] = mask[bit >> 3] >> (bit & 7) & 1;
  }
  return buffer;
}

// The op at element i, as Values whatever it returns.
template <class Op, class C, class T, class Parameter, size_t... t, size_t... p>
inline auto evaluate(
    const bool* keep,
    const std::array<const T*, Op::tensors>& in,
    const std::array<Parameter, Op::parameters>& parameters,
    int64_t i,
    std::index_sequence<t...>,
    std::index_sequence<p...>) {
  if constexpr (Op::reads_mask) {
    return Op::call(keep[i], static_cast<C>(in[t][i])..., C(parameters[p][i])...);
  } else {
    return ops::Values<C, 1>{Op::call(static_cast<C>(in[t][i])..., C(parameters[p][i])...)};
  }
}

// Where the operands of an op are, in one run of elements.
template <class Op, class T>
struct Run {
  using C = at::opmath_type<T>;
  static constexpr auto kTensors = std::make_index_sequence<Op::tensors>();
  static constexpr auto kParameters = std::make_index_sequence<Op::parameters>();
  static constexpr int kLanes = 16; // independent sums, since the compiler may not reorder one

  const Call& call;
  bool wide[ops::operands<Op>] = {}; // a parameter of type C, not T
  char* data[ops::operands<Op>] = {}; // null where absent
  int64_t strides[ops::operands<Op>] = {}; // in bytes

  Run(const at::TensorIteratorBase& iter, const Call& call, char** data, const int64_t* strides) : call(call) {
    for (int k = 0, next = Op::sums > 0; k < ops::operands<Op>; ++k) {
      if (!call.present[k]) continue;
      wide[k] = iter.dtype(next) == c10::CppTypeToScalarType<C>::value;
      this->data[k] = data[next];
      this->strides[k] = strides[next++];
    }
  }

  const C* gather_parameter(int p, int64_t i, int64_t n, C* buffer) const {
    const int k = Op::first_parameter + p;
    if (data[k] == nullptr) {
      buffer[0] = number_as<C>(*call.numbers[p]);
    } else if (wide[k]) {
      return gather<C>(data[k] + i * strides[k], strides[k], n, buffer);
    } else {
      return gather<T>(data[k] + i * strides[k], strides[k], n, buffer);
    }
    return buffer;
  }
  bool is_uniform(int p) const {
    return strides[Op::first_parameter + p] == 0; // also where it is a number
  }

  template <class Parameter>
  MULTIVERSIONED static void compute(
      std::array<T*, Op::outputs> out,
      const bool* keep,
      std::array<const T*, Op::tensors> in,
      std::array<Parameter, Op::parameters> parameters,
      int64_t n) {
    INDEPENDENT_ITERATIONS // in place, out is in[0]: each element meets itself only
        for (int64_t i = 0; i < n; ++i) {
      const auto values = evaluate<Op, C>(keep, in, parameters, i, kTensors, kParameters);
      for (int k = 0; k < Op::outputs; ++k) out[k][i] = static_cast<T>(values.value[k]);
    }
  }

  // The run lies in one channel: adds up to sums[s][0].
  template <class Parameter>
  MULTIVERSIONED static void add_along(
      std::array<C*, Op::sums> sums,
      const bool* keep,
      std::array<const T*, Op::tensors> in,
      std::array<Parameter, Op::parameters> parameters,
      int64_t n) {
    C lanes[Op::sums + 1][kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const auto values = evaluate<Op, C>(keep, in, parameters, i + lane, kTensors, kParameters);
        for (int s = 0; s < Op::sums; ++s) lanes[s][lane] += values.value[Op::outputs + s];
      }
    }
    for (; i < n; ++i) {
      const auto values = evaluate<Op, C>(keep, in, parameters, i, kTensors, kParameters);
      for (int s = 0; s < Op::sums; ++s) lanes[s][0] += values.value[Op::outputs + s];
    }
    for (int s = 0; s < Op::sums; ++s) {
      C sum{};
      for (int lane = 0; lane < kLanes; ++lane) sum += lanes[s][lane];
      *sums[s] += sum;
    }
  }

  // The run goes through the channels: adds each element to sums[s][i].
  template <class Parameter>
  MULTIVERSIONED static void add_across(
      std::array<C*, Op::sums> sums,
      const bool* keep,
      std::array<const T*, Op::tensors> in,
      std::array<Parameter, Op::parameters> parameters,
      int64_t n) {
    INDEPENDENT_ITERATIONS
    for (int64_t i = 0; i < n; ++i) {
      const auto values = evaluate<Op, C>(keep, in, parameters, i, kTensors, kParameters);
      for (int s = 0; s < Op::sums; ++s) sums[s][i] += values.value[Op::outputs + s];
    }
  }

  // All n elements. The partial sums, of an op that has some, are at sums, `sum_stride` bytes apart.
  void operator()(int64_t n, char* sums = nullptr, int64_t sum_stride = 0) const {
    bool all_uniform = true, contiguous = true;
    for (int p = 0; p < Op::parameters; ++p) all_uniform &= is_uniform(p);
    for (int k = 0; k < Op::first_parameter; ++k) contiguous &= strides[k] == sizeof(T);
    const int64_t step = contiguous && all_uniform && !Op::reads_mask ? n : kBlock;

    T in_buffers[Op::tensors][kBlock], out_buffers[Op::outputs][kBlock];
    C parameter_buffers[Op::parameters + 1][kBlock]; // + 1: an array must not be empty
    bool keep_buffer[Op::reads_mask ? kBlock : 1];
    std::fill_n(keep_buffer, std::size(keep_buffer), true);
    for (int t = 0; t < Op::tensors; ++t) {
      if (data[Op::first_tensor + t] == nullptr) std::fill_n(in_buffers[t], std::min(n, kBlock), ops::nothing<T>());
    }
    for (int64_t i = 0; i < n; i += step) {
      const int64_t count = std::min(step, n - i);
      const bool* keep = keep_buffer;
      if (Op::reads_mask && data[Op::mask_operand] != nullptr) {
        const char* at = data[Op::mask_operand];
        gather_bits(
            call.mask, at - reinterpret_cast<char*>(call.mask) + i * strides[Op::mask_operand],
            strides[Op::mask_operand], count, keep_buffer);
      }
      std::array<const T*, Op::tensors> in;
      for (int t = 0; t < Op::tensors; ++t) {
        const int k = Op::first_tensor + t;
        in[t] =
            data[k] == nullptr ? in_buffers[t] : gather<T>(data[k] + i * strides[k], strides[k], count, in_buffers[t]);
      }
      std::array<T*, Op::outputs> out;
      for (int k = 0; k < Op::outputs; ++k) {
        out[k] = data[k] != nullptr && strides[k] == sizeof(T) ? reinterpret_cast<T*>(data[k]) + i : out_buffers[k];
      }
      const auto run = [&](const auto& parameters) {
        if constexpr (Op::sums > 0) {
          std::array<C*, Op::sums> at;
          for (int s = 0; s < Op::sums; ++s) at[s] = reinterpret_cast<C*>(sums + s * call.sum_bytes + i * sum_stride);
          sum_stride == 0 ? add_along(at, keep, in, parameters, count) : add_across(at, keep, in, parameters, count);
        }
        compute(out, keep, in, parameters, count);
      };
      if (all_uniform) {
        std::array<Uniform<C>, Op::parameters> parameters;
        for (int p = 0; p < Op::parameters; ++p) parameters[p].value = *gather_parameter(p, i, 1, parameter_buffers[p]);
        run(parameters);
      } else {
        std::array<const C*, Op::parameters> parameters;
        for (int p = 0; p < Op::parameters; ++p) {
          parameters[p] = gather_parameter(p, i, is_uniform(p) ? 1 : count, parameter_buffers[p]);
          if (is_uniform(p)) parameters[p] = fill(parameter_buffers[p], *parameters[p], count);
        }
        run(parameters);
      }
      for (int k = 0; k < Op::outputs; ++k) {
        if (data[k] == nullptr || out[k] != out_buffers[k]) continue;
        for (int64_t j = 0; j < count; ++j) *reinterpret_cast<T*>(data[k] + (i + j) * strides[k]) = out_buffers[k][j];
      }
    }
  }

  static const C* fill(C* buffer, C value, int64_t n) {
    std::fill_n(buffer, n, value);
    return buffer;
  }
};

// Writes the mask of a dense output, whose elements it reads in the order in which they lie in memory.
template <class Op, class T>
void write_mask(const T* output, int64_t numel, uint8_t* mask) {
  at::Tensor bytes = at::from_blob(mask, {(numel + 31) / 32 * 4}, at::kByte);
  at::TensorIterator::borrowing_nullary_op(bytes).for_each([&](char** data, const int64_t*, int64_t n, int64_t) {
    const int64_t first = reinterpret_cast<uint8_t*>(data[0]) - mask;
    for (int64_t i = first; i < first + n; ++i) {
      uint8_t byte = 0;
      for (int64_t j = 8 * i; j < std::min(8 * i + 8, numel); ++j) {
        byte |= Op::keeps(static_cast<at::opmath_type<T>>(output[j])) << (j & 7);
      }
      mask[i] = byte;
    }
  });
}

template <class Op>
struct MapLauncher {
  static void launch(at::TensorIteratorBase& iter, const Call& call) {
    dispatch<Op>(call.dtype, [&](auto zero) {
      using T = decltype(zero);
      iter.for_each([&](char** data, const int64_t* strides, int64_t size0, int64_t size1) {
        for_each_row(
            iter.ntensors(), data, strides, size1, [&](char** row) { Run<Op, T>(iter, call, row, strides)(size0); });
      });
      if constexpr (Op::writes_mask) {
        if (call.mask != nullptr) write_mask<Op>(static_cast<const T*>(iter.data_ptr(0)), iter.numel(), call.mask);
      }
    });
  }
};

template <class Op>
struct SumLauncher {
  // Row r of the partial sums takes the r-th share of the elements.
  static void launch(at::TensorIteratorBase& iter, const Call& call) {
    dispatch<Op>(call.dtype, [&](auto zero) {
      auto add_up = [&](int64_t r) {
        auto loop = [&](char** data, const int64_t* strides, int64_t size0, int64_t size1) {
          for_each_row(iter.ntensors(), data, strides, size1, [&](char** row) {
            Run<Op, decltype(zero)>(iter, call, row, strides)(size0, row[0] + r * call.row_bytes, strides[0]);
          });
        };
        char* row = call.sums + r * call.row_bytes;
        for (int s = 0; s < Op::sums; ++s) std::memset(row + s * call.sum_bytes, 0, call.row_bytes);
        const int64_t begin = r * iter.numel() / call.rows, end = (r + 1) * iter.numel() / call.rows;
        iter.serial_for_each(loop, {begin, end});
      };
      // An iterator over the numbers of the rows, one to a thread at a time: PyTorch's threads again.
      at::Tensor numbers = at::arange(call.rows);
      at::TensorIterator::borrowing_nullary_op(numbers).for_each(
          [&](char** data, const int64_t* strides, int64_t n, int64_t) {
            for (int64_t i = 0; i < n; ++i) add_up(*reinterpret_cast<int64_t*>(data[0] + i * strides[0]));
          },
          /*grain_size=*/1);
      for (int s = 0; s < Op::sums; ++s) {
        add_rows<decltype(zero)>(call.sums + s * call.sum_bytes, call, call.totals[s]);
      }
    });
  }

  template <class T>
  static void add_rows(const char* sums, const Call& call, const Call::Total& total) {
    using C = at::opmath_type<T>;
    if (total.data == nullptr) return;
    const int64_t channels = call.row_bytes / sizeof(C), count = total.one ? 1 : channels;
    std::vector<C> sum(count);
    for (int64_t r = 0; r < call.rows; ++r) {
      const C* row = reinterpret_cast<const C*>(sums + r * call.row_bytes);
      for (int64_t c = 0; c < channels; ++c) sum[total.one ? 0 : c] += row[c];
    }
    for (int64_t c = 0; c < count; ++c) {
      if (total.wide) {
        static_cast<C*>(total.data)[c] = sum[c];
      } else {
        static_cast<T*>(total.data)[c] = static_cast<T>(sum[c]);
      }
    }
  }
};

template <class Op>
using Launcher = std::conditional_t<(Op::sums > 0), SumLauncher<Op>, MapLauncher<Op>>;

} // namespace my_cuda_op::cpu
