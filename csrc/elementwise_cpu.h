#pragma once
// The CPU's access patterns. TensorIterator orders and merges the dimensions and runs the loops on PyTorch's own
// threads: its for_each lives in libtorch, so it is parallel whatever flags this file is compiled with, and there is no
// second OpenMP runtime. What is left is a run of elements with a stride for each operand. What plain loops, which the
// compiler vectorises, cannot do in place goes through small buffers that stay in the first-level cache.

#include <ATen/TensorIterator.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "bits_cpu.h"
#include "convert_cpu.h"
#include "dtypes.h"
#include "kernel.h"

namespace my_cuda_op::cpu {

constexpr int64_t kBlock = 512; // elements in a buffer

// What a loop computes on. The rest is converted in the loop itself; but not float16, for which the compiler has no
// instruction, nor beside a mask, where all must have one width.
template <class Op, class T>
using Element = std::conditional_t<std::is_same_v<T, c10::Half> || Op::reads_mask, at::opmath_type<T>, T>;
// 0 or 1, as wide as C.
template <class C>
using Flag = std::conditional_t<sizeof(C) == sizeof(uint32_t), uint32_t, uint64_t>;

// The n elements of type T at data, as an array of Out: themselves where they are that already, else copied to the
// buffer.
template <class T, class Out>
const Out* gather(const char* data, int64_t stride, int64_t n, Out* buffer) {
  if constexpr (std::is_same_v<T, Out>) {
    if (stride == sizeof(T)) return reinterpret_cast<const T*>(data);
    for (int64_t i = 0; i < n; ++i) buffer[i] = *reinterpret_cast<const T*>(data + i * stride);
  } else {
    T elements[kBlock];
    convert(gather<T>(data, stride, n, elements), buffer, n);
  }
  return buffer;
}

// The way back: an array becomes the n elements of type T at data.
template <class T, class In>
void scatter(const In* in, char* data, int64_t stride, int64_t n) {
  if constexpr (std::is_same_v<T, In>) {
    for (int64_t i = 0; i < n; ++i) *reinterpret_cast<T*>(data + i * stride) = in[i];
  } else if (stride == sizeof(T)) {
    convert(in, reinterpret_cast<T*>(data), n);
  } else {
    T elements[kBlock];
    convert(in, elements, n);
    scatter<T>(elements, data, stride, n);
  }
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

// The op at element i, as Values whatever it returns.
template <class Op, class C, class E, class Parameter, size_t... t, size_t... p>
inline auto evaluate(
    const Flag<C>* keep,
    const std::array<const E*, Op::tensors>& in,
    const std::array<Parameter, Op::parameters>& parameters,
    int64_t i,
    std::index_sequence<t...>,
    std::index_sequence<p...>) {
  if constexpr (Op::reads_mask) {
    return Op::call(keep[i] != 0, static_cast<C>(in[t][i])..., C(parameters[p][i])...);
  } else {
    return ops::Values<C, 1>{Op::call(static_cast<C>(in[t][i])..., C(parameters[p][i])...)};
  }
}

// Where the operands of an op are, in one run of elements.
template <class Op, class T>
struct Run {
  using C = at::opmath_type<T>;
  using E = Element<Op, T>;
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

  // Writes the outputs, and what each element adds to the sums.
  template <class Parameter>
  MULTIVERSIONED static void compute(
      std::array<E*, Op::outputs> out,
      std::array<C*, Op::sums> terms,
      const Flag<C>* keep,
      std::array<const E*, Op::tensors> in,
      std::array<Parameter, Op::parameters> parameters,
      int64_t n) {
    INDEPENDENT_ITERATIONS // in place, out is in[0]: each element meets itself only
        for (int64_t i = 0; i < n; ++i) {
      const auto values = evaluate<Op, C>(keep, in, parameters, i, kTensors, kParameters);
      for (int k = 0; k < Op::outputs; ++k) out[k][i] = static_cast<E>(values.value[k]);
      for (int s = 0; s < Op::sums; ++s) terms[s][i] = values.value[Op::outputs + s];
    }
  }

  // Of elements in one channel.
  MULTIVERSIONED static void add_along(C* sum, const C* terms, int64_t n) {
    C lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += terms[i + lane];
    }
    for (; i < n; ++i) lanes[0] += terms[i];
    for (int lane = 0; lane < kLanes; ++lane) *sum += lanes[lane];
  }

  // Of elements that go through the channels.
  MULTIVERSIONED static void add_across(C* sums, const C* terms, int64_t n) {
    INDEPENDENT_ITERATIONS
    for (int64_t i = 0; i < n; ++i) sums[i] += terms[i];
  }

  // All n elements. The partial sums, of an op that has some, are at sums, `sum_stride` bytes apart. The mask, of an op
  // that writes one, begins with that of the first element.
  void operator()(int64_t n, char* sums = nullptr, int64_t sum_stride = 0, uint8_t* mask = nullptr) const {
    bool all_uniform = true, contiguous = std::is_same_v<T, E>;
    for (int p = 0; p < Op::parameters; ++p) all_uniform &= is_uniform(p);
    for (int k = 0; k < Op::first_parameter; ++k) contiguous &= strides[k] == sizeof(T);
    const bool in_place = contiguous && all_uniform && !Op::reads_mask && Op::sums == 0 && mask == nullptr;
    const int64_t step = in_place ? n : kBlock;

    E in_buffers[Op::tensors][kBlock], out_buffers[Op::outputs][kBlock];
    C parameter_buffers[Op::parameters + 1][kBlock]; // + 1: an array must not be empty
    C term_buffers[Op::sums + 1][kBlock];
    Flag<C> keep_buffer[Op::reads_mask ? kBlock : 1];
    std::fill_n(keep_buffer, std::size(keep_buffer), true);
    for (int t = 0; t < Op::tensors; ++t) {
      if (data[Op::first_tensor + t] == nullptr) std::fill_n(in_buffers[t], std::min(n, kBlock), ops::nothing<E>());
    }
    for (int64_t i = 0; i < n; i += step) {
      const int64_t count = std::min(step, n - i);
      if (Op::reads_mask && data[Op::mask_operand] != nullptr) {
        const int64_t stride = strides[Op::mask_operand];
        const int64_t first = data[Op::mask_operand] - reinterpret_cast<char*>(call.mask) + i * stride;
        unpack_bits(call.mask, first, stride, count, keep_buffer);
      }
      std::array<const E*, Op::tensors> in;
      for (int t = 0; t < Op::tensors; ++t) {
        const int k = Op::first_tensor + t;
        in[t] =
            data[k] == nullptr ? in_buffers[t] : gather<T>(data[k] + i * strides[k], strides[k], count, in_buffers[t]);
      }
      std::array<E*, Op::outputs> out;
      for (int k = 0; k < Op::outputs; ++k) {
        const bool direct = std::is_same_v<T, E> && data[k] != nullptr && strides[k] == sizeof(T);
        out[k] = direct ? reinterpret_cast<E*>(data[k]) + i : out_buffers[k];
      }
      std::array<C*, Op::sums> terms;
      for (int s = 0; s < Op::sums; ++s) terms[s] = term_buffers[s];

      if (all_uniform) {
        std::array<Uniform<C>, Op::parameters> parameters;
        for (int p = 0; p < Op::parameters; ++p) parameters[p].value = *gather_parameter(p, i, 1, parameter_buffers[p]);
        compute(out, terms, keep_buffer, in, parameters, count);
      } else {
        std::array<const C*, Op::parameters> parameters;
        for (int p = 0; p < Op::parameters; ++p) {
          parameters[p] = gather_parameter(p, i, is_uniform(p) ? 1 : count, parameter_buffers[p]);
          if (is_uniform(p)) parameters[p] = fill(parameter_buffers[p], *parameters[p], count);
        }
        compute(out, terms, keep_buffer, in, parameters, count);
      }

      for (int k = 0; k < Op::outputs; ++k) {
        if (data[k] != nullptr && out[k] == out_buffers[k]) {
          scatter<T>(out[k], data[k] + i * strides[k], strides[k], count);
        }
      }
      for (int s = 0; s < Op::sums; ++s) {
        if (call.totals[s].data == nullptr) continue;
        C* at = reinterpret_cast<C*>(sums + s * call.sum_bytes + i * sum_stride);
        sum_stride == 0 ? add_along(at, terms[s], count) : add_across(at, terms[s], count);
      }
      if constexpr (Op::writes_mask) {
        if (mask != nullptr) write_bits(data[0] + i * sizeof(T), count, mask + i / 8);
      }
    }
  }

  // The mask of n elements of a dense output.
  static void write_bits(const char* output, int64_t n, uint8_t* mask) {
    E buffer[kBlock];
    bool keep[kBlock];
    keep_bits(gather<T>(output, sizeof(T), n, buffer), n, keep);
    pack_bits(keep, n, mask);
  }
  MULTIVERSIONED static void keep_bits(const E* output, int64_t n, bool* keep) {
    for (int64_t i = 0; i < n; ++i) keep[i] = Op::keeps(static_cast<C>(output[i]));
  }

  static const C* fill(C* buffer, C value, int64_t n) {
    std::fill_n(buffer, n, value);
    return buffer;
  }
};

template <class Op>
struct MapLauncher {
  static void launch(at::TensorIteratorBase& iter, const Call& call) {
    dispatch<Op>(call.dtype, [&](auto zero) {
      using T = decltype(zero);
      const char* output = static_cast<const char*>(iter.data_ptr(0));
      const auto loop = [&](char** data, const int64_t* strides, int64_t size0, int64_t size1) {
        for_each_row(iter.ntensors(), data, strides, size1, [&](char** row) {
          uint8_t* mask = call.mask;
          if (Op::writes_mask && mask != nullptr) mask += (row[0] - output) / sizeof(T) / 8;
          Run<Op, T>(iter, call, row, strides)(size0, nullptr, 0, Op::writes_mask ? mask : nullptr);
        });
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

template <class Op>
struct SumLauncher {
  // Row r of the partial sums takes the r-th share of the elements.
  static void launch(at::TensorIteratorBase& iter, const Call& call) {
    dispatch<Op>(call.dtype, [&](auto zero) {
      const auto add_up = [&](int64_t r) {
        const auto loop = [&](char** data, const int64_t* strides, int64_t size0, int64_t size1) {
          for_each_row(iter.ntensors(), data, strides, size1, [&](char** row) {
            Run<Op, decltype(zero)>(iter, call, row, strides)(size0, row[0] + r * call.row_bytes, strides[0]);
          });
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
