#pragma once
// A run of elements with a stride for each operand, on a CPU: what TensorIterator leaves of a call. What plain loops,
// which the compiler vectorises, cannot do in place goes through small buffers that stay in the first-level cache.

#include <ATen/TensorIterator.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

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
// Of a mask: 0 where its bit is, and as wide as C.
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

// Runs of elements with a stride, in bytes, for each operand of an op.
template <class Op, class T>
struct Runs {
  using C = at::opmath_type<T>;
  using E = Element<Op, T>;
  static constexpr auto kTensors = std::make_index_sequence<Op::tensors>();
  static constexpr auto kParameters = std::make_index_sequence<Op::parameters>();
  static constexpr int kLanes = 16; // independent sums, since the compiler may not reorder one

  const Call& call;
  int number[ops::operands<Op>]; // among the iterator's operands
  bool wide[ops::operands<Op>] = {}; // a parameter of type C, not T
  int64_t strides[ops::operands<Op>] = {};
  bool is_uniform = true; // Is every parameter one number?
  bool is_contiguous = std::is_same_v<T, E>;
  bool only_sums = true;

  // What is one number all over a run is here from the run's beginning, or from the construction, where it is absent.
  E inputs[Op::tensors][kBlock], outputs[Op::outputs][kBlock];
  C parameters[Op::parameters + 1][kBlock], terms[Op::sums + 1][kBlock]; // + 1: an array must not be empty
  Flag<C> keep[Op::reads_mask ? kBlock : 1];

  Runs(const at::TensorIteratorBase& iter, const Call& call, const int64_t* strides) : call(call) {
    for (int k = 0, next = Op::sums > 0; k < ops::operands<Op>; ++k) {
      number[k] = next;
      if (call.present[k]) {
        wide[k] = iter.dtype(next) == c10::CppTypeToScalarType<C>::value;
        this->strides[k] = strides[next++];
      } else if (is_tensor(k)) {
        std::fill_n(inputs[k - Op::first_tensor], kBlock, ops::nothing<E>());
      } else if (is_parameter(k)) {
        parameters[k - Op::first_parameter][0] = number_as<C>(*call.numbers[k - Op::first_parameter]);
      }
      is_uniform &= !is_parameter(k) || this->strides[k] == 0;
      only_sums &= k >= Op::first_tensor || !call.present[k];
      is_contiguous &= k >= Op::first_parameter || this->strides[k] == sizeof(T);
    }
    if (Op::reads_mask && !call.present[Op::mask_operand]) std::fill_n(keep, kBlock, 1);
  }

  // Are rows of `length` elements, which lie so far apart, one run, in which parameters and sums come round again?
  bool are_one_run(const int64_t* row_strides, int64_t length) const {
    bool one = std::lcm(length, 8) <= kBlock && (Op::sums == 0 || row_strides[0] == 0);
    for (int k = 0; k < ops::operands<Op>; ++k) {
      if (call.present[k]) one &= row_strides[number[k]] == (is_parameter(k) ? 0 : length * strides[k]);
    }
    return one;
  }

  static constexpr bool is_tensor(int k) {
    return Op::first_tensor <= k && k < Op::first_parameter;
  }
  static constexpr bool is_parameter(int k) {
    return Op::first_parameter <= k && k < Op::mask_operand;
  }

  // Writes the outputs, unless there are only sums, and what each element adds to those.
  template <bool kOnlySums, class Parameter>
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
      for (int k = 0; k < Op::outputs && !kOnlySums; ++k) out[k][i] = static_cast<E>(values.value[k]);
      for (int s = 0; s < Op::sums; ++s) terms[s][i] = values.value[Op::outputs + s];
    }
  }

  // Of elements in one channel.
  MULTIVERSIONED static void add_along(C* sum, const C* terms, int64_t n) {
    C lanes[kLanes] = {};
    int64_t i = 0;
    for (; i + 4 * kLanes <= n; i += 4 * kLanes) { // four at once, so that fewer additions wait for the one before
      for (int lane = 0; lane < kLanes; ++lane) {
        const C* at = terms + i + lane;
        lanes[lane] += at[0] + at[kLanes] + (at[2 * kLanes] + at[3 * kLanes]);
      }
    }
    for (; i + kLanes <= n; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += terms[i + lane];
    }
    for (; i < n; ++i) lanes[0] += terms[i];
    for (int lane = 0; lane < kLanes; ++lane) *sum += lanes[lane];
  }

  // Of n elements that go through the channels, again and again.
  MULTIVERSIONED static void add_across(C* sums, const C* terms, int64_t channels, int64_t n) {
    for (int64_t first = 0; first < n; first += channels) {
      INDEPENDENT_ITERATIONS
      for (int64_t i = 0; i < channels; ++i) sums[i] += terms[first + i];
    }
  }

  // One run of n elements. The partial sums, of an op that has some, are at sums, `sum_stride` bytes apart. The mask,
  // of an op that writes one, begins with that of the first element. With a period, parameters and sums have so many
  // elements, and come round again.
  void operator()(
      char** data, int64_t n, int64_t period, char* sums = nullptr, int64_t sum_stride = 0, uint8_t* mask = nullptr) {
    const bool unbuffered = is_contiguous && is_uniform && !Op::reads_mask && Op::sums == 0 && mask == nullptr;
    const int64_t whole = std::lcm(std::max<int64_t>(period, 1), 8); // periods, and bytes of the mask
    const int64_t step = unbuffered ? n : kBlock / whole * whole;
    for (int64_t i = 0; i < n; i += step) {
      const int64_t count = std::min(step, n - i);
      const auto at = [&](int k) { return data[number[k]] + i * strides[k]; };
      std::array<E*, Op::outputs> out;
      for (int k = 0; k < Op::outputs; ++k) {
        const bool direct = std::is_same_v<T, E> && call.present[k] && strides[k] == sizeof(T);
        out[k] = direct ? reinterpret_cast<E*>(at(k)) : outputs[k];
      }
      std::array<const E*, Op::tensors> in;
      for (int t = 0; t < Op::tensors; ++t) {
        const int k = Op::first_tensor + t;
        in[t] = inputs[t];
        if (call.present[k] && (strides[k] != 0 || i == 0)) in[t] = gather<T>(at(k), strides[k], count, inputs[t]);
      }
      std::array<C*, Op::sums> added;
      for (int s = 0; s < Op::sums; ++s) added[s] = terms[s];
      if (Op::reads_mask && call.present[Op::mask_operand]) {
        unpack_bits(
            call.mask, at(Op::mask_operand) - reinterpret_cast<char*>(call.mask), strides[Op::mask_operand], count,
            keep);
      }

      if (is_uniform) {
        std::array<Uniform<C>, Op::parameters> numbers;
        for (int p = 0; p < Op::parameters; ++p) {
          const int k = Op::first_parameter + p;
          numbers[p].value = call.present[k] ? *gather_parameter(k, at(k), 1) : parameters[p][0];
        }
        compute_any(out, added, in, numbers, count);
      } else {
        std::array<const C*, Op::parameters> arrays;
        for (int p = 0; p < Op::parameters; ++p) {
          const int k = Op::first_parameter + p;
          arrays[p] = parameters[p];
          if (strides[k] != 0 && period == 0) {
            arrays[p] = gather_parameter(k, at(k), count);
          } else if (strides[k] != 0 && i == 0) {
            const C* once = gather_parameter(k, at(k), period);
            for (int64_t j = 0; j < count; j += period) std::copy_n(once, period, parameters[p] + j);
          } else if (i == 0) {
            const C value = call.present[k] ? *gather_parameter(k, at(k), 1) : parameters[p][0];
            std::fill_n(parameters[p], count, value);
          }
        }
        compute_any(out, added, in, arrays, count);
      }

      for (int k = 0; k < Op::outputs; ++k) {
        if (call.present[k] && out[k] == outputs[k]) scatter<T>(out[k], at(k), strides[k], count);
      }
      for (int s = 0; s < Op::sums; ++s) {
        C* total = reinterpret_cast<C*>(sums + s * call.sum_bytes + (period == 0 ? i * sum_stride : 0));
        if (sum_stride == 0) {
          add_along(total, terms[s], count);
        } else {
          add_across(total, terms[s], period == 0 ? count : period, count);
        }
      }
      if constexpr (Op::writes_mask) {
        if (mask != nullptr) write_bits(at(0), count, mask + i / 8);
      }
    }
  }

  template <class Parameter>
  void compute_any(
      std::array<E*, Op::outputs> out,
      std::array<C*, Op::sums> terms,
      std::array<const E*, Op::tensors> in,
      std::array<Parameter, Op::parameters> parameters,
      int64_t n) const {
    if constexpr (Op::sums > 0) {
      if (only_sums) return compute<true>(out, terms, keep, in, parameters, n);
    }
    compute<false>(out, terms, keep, in, parameters, n);
  }

  const C* gather_parameter(int k, const char* data, int64_t n) {
    C* buffer = parameters[k - Op::first_parameter];
    return wide[k] ? gather<C>(data, strides[k], n, buffer) : gather<T>(data, strides[k], n, buffer);
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
};

} // namespace my_cuda_op::cpu
