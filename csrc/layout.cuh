#pragma once
// How a kernel finds the elements of its operands: the access patterns, and where the vectors of each lie.

#include <c10/core/ScalarType.h>

#include <ATen/cuda/detail/IntegerDivider.cuh> // does not include what it uses: elementwise.cuh does, before this file
#include <algorithm>
#include <optional>

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

template <class T>
int64_t vectors(int64_t elements) {
  return (elements + kLanes<T> - 1) / kLanes<T>;
}

using Divider = at::cuda::detail::IntDivider<uint32_t>;

inline bool is_aligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}

// How a kernel finds the elements of its operands.
enum class Access {
  kFlat, // every tensor is one run of vectors, every parameter one number
  kChannels, // every tensor is one run of vectors, each of them of one channel
  kAcross, // every tensor is one run of vectors, each of them across neighbouring channels
  kAcrossWide, // the same, and parameters are of the compute type, which is another
  kWhole, // along dimension 0 every tensor has whole vectors only
  kAlike, // the same, and all have the same strides
  kRows, // the same, or one element over and over
  kAny,
  kTiles, // kAny where some tensor is contiguous along dimension 1: a block goes through a tile of dimensions 0 and 1
};

// What an operand is along dimension 0.
enum class Kind : uint8_t {
  kAbsent, // of a parameter: a number
  kUniform, // one element over and over
  kVectors, // contiguous, and every vector is aligned
  kStrided,
};

// The operands of an op in a kernel, by the op's own numbers. Strides are in bytes.
template <class Op, class T>
struct Operands {
  using C = at::opmath_type<T>;
  static constexpr int kCount = ops::operands<Op>;

  char* data[kCount]; // null where absent
  Kind kind[kCount];
  bool wide[kCount]; // of a parameter: is it of type C?
  int64_t element_strides[kCount]; // from one lane of a vector to the next
  C numbers[Op::parameters + 1]; // + 1: an array must not be empty
  uint32_t* mask;

  static constexpr bool is_parameter(int k) {
    return Op::first_parameter <= k && k < Op::mask_operand;
  }

  // The plan's operands from number `next` on.
  Operands(const Plan& plan, const Call& call, int next) : numbers{}, mask(reinterpret_cast<uint32_t*>(call.mask)) {
    for (int p = 0; p < Op::parameters; ++p) {
      if (call.numbers[p]) numbers[p] = number_as<C>(*call.numbers[p]);
    }
    for (int k = 0; k < kCount; ++k) {
      data[k] = nullptr;
      kind[k] = Kind::kAbsent;
      wide[k] = false;
      element_strides[k] = 0;
      if (!call.present[k]) continue;
      const auto& operand = plan.operand[next++];
      data[k] = operand.data;
      wide[k] = operand.dtype == c10::CppTypeToScalarType<C>::value;
      element_strides[k] = plan.ndim == 0 ? 0 : operand.strides[0];
      const bool vectors =
          k == Op::mask_operand
              ? element_strides[k] == 1 && (operand.data - reinterpret_cast<char*>(call.mask)) % kLanes<T> == 0
              : element_strides[k] == (wide[k] ? sizeof(C) : sizeof(T)) && is_aligned(operand.data);
      kind[k] = element_strides[k] == 0 ? Kind::kUniform : vectors ? Kind::kVectors : Kind::kStrided;
    }
  }

  // Is parameter k of type C, not T?
  template <Access kAccess = Access::kAny>
  C10_HOST_DEVICE bool is_wide(int k) const {
    if (std::is_same_v<T, C> || kAccess == Access::kAcross) return false;
    return kAccess == Access::kAcrossWide || wide[k];
  }

  // A vector may begin so many bytes further.
  void may_step(int k, int64_t bytes) {
    const int64_t unit = k == Op::mask_operand ? kLanes<T> : kVectorBytes;
    if (kind[k] == Kind::kVectors && bytes % unit != 0) kind[k] = Kind::kStrided;
  }

  // From one vector of a run to the next.
  static constexpr int64_t vector_stride(int k) {
    return k == Op::mask_operand ? kLanes<T> : kVectorBytes;
  }
};

// Where the vectors are. The dimensions go from the fastest to the slowest; the first one counts vectors. kRows always
// goes through as many as it can have: the loop has no branch then.
template <class Op, class T, Access kAccess, int dims = kAccess == Access::kRows ? 3 : kMaxDims>
struct Layout {
  static constexpr int kCount = ops::operands<Op>, kDims = dims;
  int ndim = 0;
  bool narrow; // Offsets of work with more than one dimension fit into 32 bits (see for_each_plan).
  Divider sizes[kDims]; // division by an invariant is a multiplication
  int64_t strides[kDims][kCount] = {};

  explicit Layout(const Plan& plan) : narrow(plan.ndim > 1) {
    if (kAccess != Access::kAny) std::fill_n(sizes, kDims, Divider(1));
  }

  // Adds the plan's dimension d, in steps of so many elements, of which it has `size`.
  void add_dimension(
      Operands<Op, T>& operands, const Plan& plan, const Call& call, int next, int d, int64_t size, int64_t step) {
    // The last dimension divides nothing, and may not fit into the divider's 31 bits.
    if (plan.ndim > 1) sizes[ndim] = Divider(static_cast<uint32_t>(size));
    for (int k = 0; k < kCount; ++k) {
      strides[ndim][k] = call.present[k] ? plan.operand[next++].strides[d] * step : 0;
      operands.may_step(k, strides[ndim][k]);
    }
    ++ndim;
  }

  // Do the operands suit it? A row has so many elements.
  static bool suits(const Operands<Op, T>& operands, int64_t row_length) {
    bool rows = row_length % kLanes<T> == 0;
    for (int k = 0; k < kCount; ++k) {
      const bool may_be_uniform = Operands<Op, T>::is_parameter(k) ||
                                  (kAccess == Access::kRows && Op::first_tensor <= k && k < Op::first_parameter);
      rows &= operands.kind[k] != Kind::kStrided && (may_be_uniform || operands.kind[k] != Kind::kUniform);
    }
    return rows;
  }

  // Of all tensors, or of the first, whose offset then is that of all: fewer registers leave room for more threads.
  static constexpr bool has_offset(int k) {
    return kAccess != Access::kAlike || k == Op::first_tensor;
  }

  // Adds the offsets of item `index` of all dimensions; returns its index in the first.
  __device__ int64_t add_offsets(int64_t index, int64_t (&offsets)[kCount]) const {
    const int64_t first = add_distinct_offsets(index, offsets);
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (has_offset(k) || Operands<Op, T>::is_parameter(k)) continue;
      const int64_t offset = offsets[Op::first_tensor];
      offsets[k] = k == Op::mask_operand ? offset / static_cast<int>(sizeof(T)) : offset;
    }
    return first;
  }

  __device__ int64_t add_distinct_offsets(int64_t index, int64_t (&offsets)[kCount]) const {
    int64_t first = 0;
    if (!narrow) {
      first = index;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (has_offset(k)) offsets[k] += index * strides[0][k];
      }
      return first;
    }
    uint32_t rest = static_cast<uint32_t>(index), sums[kCount] = {};
    const int last = (kAccess == Access::kAny ? ndim : kDims) - 1;
#pragma unroll(kAccess == Access::kAny ? 1 : kDims)
    for (int d = 0; d <= last; ++d) {
      uint32_t i = rest;
      if (d < last) {
        const auto divided = sizes[d].divmod(rest);
        rest = divided.div;
        i = divided.mod;
      }
      if (d == 0) first = i;
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        if (has_offset(k)) sums[k] += i * static_cast<uint32_t>(strides[d][k]);
      }
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (has_offset(k)) offsets[k] += static_cast<int32_t>(sums[k]);
    }
    return first;
  }
};

// One run of vectors.
template <class Op, class T>
struct Layout<Op, T, Access::kFlat, kMaxDims> {
  __device__ int64_t add_offsets(int64_t index, int64_t (&offsets)[ops::operands<Op>]) const {
#pragma unroll
    for (int k = 0; k < ops::operands<Op>; ++k) {
      if (!Operands<Op, T>::is_parameter(k)) offsets[k] += index * Operands<Op, T>::vector_stride(k);
    }
    return index;
  }
};

// One run of vectors, in which the channels come round again and again.
template <class Op, class T, Access kAccess>
struct RunOfChannels : Layout<Op, T, Access::kFlat> {
  Divider run, channels; // how many vectors lie in one channel; how many channels (vectors of them, across) there are
  int64_t strides[Op::parameters];
  static constexpr bool kAlong = kAccess == Access::kChannels;

  // The same as `rows`, if that is possible.
  static std::optional<RunOfChannels> make(
      const Operands<Op, T>& operands, const Layout<Op, T, Access::kRows>& rows, const Plan& plan) {
    int channel = -1;
    int64_t vectors = 1, run = 1;
    for (int d = 0; d < plan.ndim; ++d) {
      for (int k = 0; k < ops::operands<Op>; ++k) {
        if (operands.kind[k] == Kind::kAbsent) continue;
        if (!Operands<Op, T>::is_parameter(k)) {
          if (rows.strides[d][k] != vectors * Operands<Op, T>::vector_stride(k)) return {};
        } else if (!kAlong && operands.is_wide(k) != (kAccess == Access::kAcrossWide)) {
          return {};
        } else if (rows.strides[d][k] != 0) {
          if (channel >= 0 && channel != d) return {};
          channel = d;
        }
      }
      if (channel == d) run = vectors;
      vectors *= d == 0 ? plan.sizes[0] / kLanes<T> : plan.sizes[d];
    }
    if (channel < 0 || (channel == 0) == kAlong) return {};
    RunOfChannels layout;
    layout.run = Divider(static_cast<uint32_t>(run));
    layout.channels = Divider(static_cast<uint32_t>(channel == 0 ? plan.sizes[0] / kLanes<T> : plan.sizes[channel]));
    for (int p = 0; p < Op::parameters; ++p) layout.strides[p] = rows.strides[channel][Op::first_parameter + p];
    return layout;
  }

  __device__ int64_t add_offsets(int64_t index, int64_t (&offsets)[ops::operands<Op>]) const {
    const auto vector = static_cast<uint32_t>(index);
    const uint32_t channel = channels.mod(kAlong ? run.div(vector) : vector);
#pragma unroll
    for (int p = 0; p < Op::parameters; ++p) offsets[Op::first_parameter + p] += channel * strides[p];
    return Layout<Op, T, Access::kFlat>::add_offsets(index, offsets);
  }
};
template <class Op, class T>
struct Layout<Op, T, Access::kChannels, kMaxDims> : RunOfChannels<Op, T, Access::kChannels> {};
template <class Op, class T>
struct Layout<Op, T, Access::kAcross, kMaxDims> : RunOfChannels<Op, T, Access::kAcross> {};
template <class Op, class T>
struct Layout<Op, T, Access::kAcrossWide, kMaxDims> : RunOfChannels<Op, T, Access::kAcrossWide> {};

template <class Op, class T>
struct Layout<Op, T, Access::kTiles, kMaxDims> : Layout<Op, T, Access::kAny> {
  static constexpr uint32_t kRows = 32, kColumns = kThreads / kRows; // a tile has so many of dimension 1, and vectors
  uint32_t columns, rows, others; // vectors of a row; sizes of dimension 1 and of the rest
  Divider across, down; // tiles

  Layout(const Layout<Op, T, Access::kAny>& any, const Plan& plan, int64_t vectors)
      : Layout<Op, T, Access::kAny>(any),
        columns(static_cast<uint32_t>(cuda::vectors<T>(plan.sizes[0]))),
        rows(static_cast<uint32_t>(plan.sizes[1])),
        others(static_cast<uint32_t>(vectors / columns / rows)),
        across((columns + kColumns - 1) / kColumns),
        down((rows + kRows - 1) / kRows) {}

  int64_t blocks() const {
    return static_cast<int64_t>(across.divisor) * down.divisor * others;
  }

  // Of this thread; past all where the tile reaches over the edge. A warp has 16 rows and two vectors of each: whole
  // sectors of 32 bytes in either direction.
  __device__ int64_t item() const {
    const auto by_column = across.divmod(blockIdx.x);
    const auto by_row = down.divmod(by_column.div);
    const uint32_t row = by_row.mod * kRows + threadIdx.x / 32 % 2 * 16 + threadIdx.x % 16;
    const uint32_t column = by_column.mod * kColumns + threadIdx.x / 64 * 2 + threadIdx.x / 16 % 2;
    if (row >= rows || column >= columns) return INT64_MAX;
    return (static_cast<int64_t>(by_row.div) * rows + row) * columns + column;
  }
};

} // namespace my_cuda_op::cuda
