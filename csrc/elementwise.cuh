#pragma once
// What the CUDA access patterns of map.cuh and sum.cuh share: how a vector of elements is loaded, computed and stored,
// and the one <<<>>>, with its device guard, current stream and launch check. An op has no launch code of its own.

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <ATen/cuda/detail/IntegerDivider.cuh> // last: it does not include what it uses
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "dtypes.h"
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

template <class Arguments>
void launch_kernel(c10::Device device, dim3 grid, void (*kernel)(Arguments), const Arguments& arguments) {
  const c10::cuda::CUDAGuard guard(device); // else a kernel for cuda:1 runs on cuda:0
  kernel<<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream(device.index())>>>(arguments);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

// How a kernel finds the elements of its operands.
enum class Access {
  kFlat, // every tensor is one run of vectors, every parameter one number
  kChannels, // every tensor is one run of vectors, each of them of one channel
  kAcross, // every tensor is one run of vectors, each of them across neighbouring channels
  kWhole, // along dimension 0 every tensor has whole vectors only
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
  bool wide[kCount]; // a parameter of type C, not T
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

  // Adds the offsets of item `index` of all dimensions; returns its index in the first.
  __device__ int64_t add_offsets(int64_t index, int64_t (&offsets)[kCount]) const {
    int64_t first = 0;
    if (!narrow) {
      first = index;
#pragma unroll
      for (int k = 0; k < kCount; ++k) offsets[k] += index * strides[0][k];
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
      for (int k = 0; k < kCount; ++k) sums[k] += i * static_cast<uint32_t>(strides[d][k]);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) offsets[k] += static_cast<int32_t>(sums[k]);
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
  Divider run, channels; // how many vectors lie in one channel; how many channels (kAcross: vectors of them) there are
  int64_t strides[Op::parameters];

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
        } else if (rows.strides[d][k] != 0) {
          if (channel >= 0 && channel != d) return {};
          channel = d;
        }
      }
      if (channel == d) run = vectors;
      vectors *= d == 0 ? plan.sizes[0] / kLanes<T> : plan.sizes[d];
    }
    if (channel < 0 || (channel == 0) != (kAccess == Access::kAcross)) return {};
    RunOfChannels layout;
    layout.run = Divider(static_cast<uint32_t>(run));
    layout.channels = Divider(static_cast<uint32_t>(channel == 0 ? plan.sizes[0] / kLanes<T> : plan.sizes[channel]));
    for (int p = 0; p < Op::parameters; ++p) layout.strides[p] = rows.strides[channel][Op::first_parameter + p];
    return layout;
  }

  __device__ int64_t add_offsets(int64_t index, int64_t (&offsets)[ops::operands<Op>]) const {
    const auto vector = static_cast<uint32_t>(index);
    const uint32_t channel = channels.mod(kAccess == Access::kAcross ? vector : run.div(vector));
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

  // Of this thread; -1 where the tile reaches over the edge. A warp has 16 rows and two vectors of each: whole sectors
  // of 32 bytes in either direction.
  __device__ int64_t item() const {
    const auto by_column = across.divmod(blockIdx.x);
    const auto by_row = down.divmod(by_column.div);
    const uint32_t row = by_row.mod * kRows + threadIdx.x / 32 % 2 * 16 + threadIdx.x % 16;
    const uint32_t column = by_column.mod * kColumns + threadIdx.x / 64 * 2 + threadIdx.x / 16 % 2;
    if (row >= rows || column >= columns) return -1;
    return (static_cast<int64_t>(by_row.div) * rows + row) * columns + column;
  }
};

// A vector stays in the registers that a load has filled until everything is loaded: code that looked at its lanes
// before would wait for them, and the next load with it.
template <class T>
__device__ uint4 as_words(const Vector<T>& vector) {
  uint4 words;
  memcpy(&words, &vector, sizeof(words));
  return words;
}
template <class T, class C>
__device__ void unpack(C (&lanes)[kLanes<T>], uint4 words) {
  // An empty instruction: the compiler cannot see through it, and so does not take the words apart any earlier.
  // (Without volatile nvcc 13.0 once dropped the loads before it.)
  asm volatile("" : "+r"(words.x), "+r"(words.y), "+r"(words.z), "+r"(words.w));
  Vector<T> vector;
  memcpy(&vector, &words, sizeof(words));
#pragma unroll
  for (int i = 0; i < kLanes<T>; ++i) lanes[i] = static_cast<C>(vector.lane[i]);
}
template <class T, class C>
__device__ uint4 pack(const C (&lanes)[kLanes<T>]) {
  if constexpr (std::is_same_v<T, c10::BFloat16> || std::is_same_v<T, c10::Half>) { // one instruction rounds two
    uint32_t pairs[kLanes<T> / 2];
#pragma unroll
    for (int i = 0; i < kLanes<T>; i += 2) {
      if constexpr (std::is_same_v<T, c10::Half>) {
        const __half2 pair = __floats2half2_rn(lanes[i], lanes[i + 1]);
        memcpy(&pairs[i / 2], &pair, sizeof(pair));
      } else {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(lanes[i], lanes[i + 1]);
        memcpy(&pairs[i / 2], &pair, sizeof(pair));
      }
    }
    return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  } else {
    Vector<T> vector;
#pragma unroll
    for (int i = 0; i < kLanes<T>; ++i) vector.lane[i] = static_cast<T>(lanes[i]);
    return as_words(vector);
  }
}

// `count` elements of T, `stride` bytes apart.
template <class T>
__device__ uint4 load(const char* data, Kind kind, int64_t stride, int count) {
  if (kind == Kind::kVectors && count >= kLanes<T>) return *reinterpret_cast<const uint4*>(data);
  Vector<T> vector;
  if (kind == Kind::kUniform) {
    const T element = *reinterpret_cast<const T*>(data);
#pragma unroll
    for (int i = 0; i < kLanes<T>; ++i) vector.lane[i] = element;
  } else {
#pragma unroll
    for (int i = 0; i < kLanes<T>; ++i) {
      vector.lane[i] = i < count ? *reinterpret_cast<const T*>(data + i * stride) : T(0);
    }
  }
  return as_words(vector);
}

// `count` bits of the mask, `stride` apart, from number `first` on.
__device__ inline unsigned load_bits(const uint32_t* mask, int64_t first, bool whole, int64_t stride, int count) {
  if (whole) return mask[first >> 5] >> (first & 31);
  unsigned bits = 0;
  for (int i = 0; i < count; ++i) {
    const int64_t bit = first + i * stride;
    bits |= (mask[bit >> 5] >> (bit & 31) & 1) << i;
  }
  return bits;
}

// Is every vector whole, and are the tensors one run?
template <Access kAccess>
constexpr bool is_whole = kAccess != Access::kFlat && kAccess != Access::kAny;
template <Access kAccess>
constexpr bool is_run = kAccess < Access::kWhole;
// Is no parameter more than one number in a vector?
template <Access kAccess>
constexpr bool is_uniform = kAccess == Access::kFlat || kAccess == Access::kChannels;

// What one vector is computed from.
template <class Op>
struct Tensors {
  uint4 words[Op::tensors];
  unsigned keep = ~0u;
};

template <Access kAccess, class Op, class T>
__device__ Tensors<Op> load_tensors(const Operands<Op, T>& a, const int64_t (&offsets)[ops::operands<Op>], int count) {
  const bool whole = is_whole<kAccess> || count == kLanes<T>;
  Tensors<Op> loaded;
#pragma unroll
  for (int t = 0; t < Op::tensors; ++t) {
    const int k = Op::first_tensor + t;
    const char* data = a.data[k] + offsets[k];
    if (t > 0 && a.data[k] == nullptr) {
      loaded.words[t] = make_uint4(0, 0, 0, 0); // which nothing reads
    } else if (kAccess == Access::kAny) {
      loaded.words[t] = load<T>(data, a.kind[k], a.element_strides[k], count);
    } else if (whole && (kAccess <= Access::kWhole || a.kind[k] == Kind::kVectors)) {
      loaded.words[t] = *reinterpret_cast<const uint4*>(data);
    } else {
      loaded.words[t] = load<T>(data, is_run<kAccess> ? Kind::kStrided : Kind::kUniform, sizeof(T), count);
    }
  }
  if constexpr (Op::reads_mask) {
    constexpr int k = Op::mask_operand;
    if (a.data[k] != nullptr) {
      const int64_t first = a.data[k] - reinterpret_cast<char*>(a.mask) + offsets[k];
      const bool vectors = kAccess != Access::kAny || a.kind[k] == Kind::kVectors;
      loaded.keep = load_bits(a.mask, first, whole && vectors, is_run<kAccess> ? 1 : a.element_strides[k], count);
    }
  }
  return loaded;
}

// The parameters of one vector: by load_parameters, and later, when all else is loaded, ready to be used by spread.
template <class Op, class T>
struct Parameters {
  using C = at::opmath_type<T>;
  uint4 words[Op::parameters + 1]; // of a parameter of type T
  C lanes[Op::parameters + 1][kLanes<T>]; // of one of type C
};

template <Access kAccess, class Op, class T>
__device__ Parameters<Op, T> load_parameters(
    const Operands<Op, T>& a, const int64_t (&offsets)[ops::operands<Op>], int count) {
  using C = at::opmath_type<T>;
  Parameters<Op, T> loaded;
#pragma unroll
  for (int p = 0; p < Op::parameters; ++p) {
    const int k = Op::first_parameter + p;
    const char* data = a.data[k] + offsets[k];
    const bool wide = std::is_same_v<T, C> || a.wide[k];
    if (a.kind[k] == Kind::kAbsent) {
      loaded.lanes[p][0] = a.numbers[p];
    } else if (is_uniform<kAccess> || a.kind[k] == Kind::kUniform) {
      if (wide) {
        loaded.lanes[p][0] = *reinterpret_cast<const C*>(data);
      } else {
        Vector<T> vector{};
        vector.lane[0] = *reinterpret_cast<const T*>(data);
        loaded.words[p] = as_words(vector);
      }
    } else if (wide) {
      constexpr int kPart = kLanes<C>; // lanes of one load
#pragma unroll
      for (int first = 0; first < kLanes<T>; first += kPart) {
        const int left = count - first;
        const int64_t stride = a.element_strides[k];
        const uint4 words = is_whole<kAccess>
                                ? *reinterpret_cast<const uint4*>(data + first * sizeof(C))
                                : load<C>(data + (left > 0 ? first * stride : 0), a.kind[k], stride, left);
        memcpy(&loaded.lanes[p][first], &words, sizeof(words));
      }
    } else {
      loaded.words[p] = is_whole<kAccess> ? *reinterpret_cast<const uint4*>(data)
                                          : load<T>(data, a.kind[k], a.element_strides[k], count);
    }
  }
  return loaded;
}

// Gives every lane its parameter, in the compute type.
template <Access kAccess, class Op, class T>
__device__ void spread(Parameters<Op, T>& loaded, const Operands<Op, T>& a) {
  using C = at::opmath_type<T>;
#pragma unroll
  for (int p = 0; p < Op::parameters; ++p) {
    const int k = Op::first_parameter + p;
    const bool wide = std::is_same_v<T, C> || a.wide[k] || a.kind[k] == Kind::kAbsent;
    if (!wide) unpack<T>(loaded.lanes[p], loaded.words[p]);
    if (is_uniform<kAccess> || a.kind[k] == Kind::kAbsent || a.kind[k] == Kind::kUniform) {
#pragma unroll
      for (int i = 1; i < kLanes<T>; ++i) loaded.lanes[p][i] = loaded.lanes[p][0];
    }
  }
}

// The op at one lane, as Values whatever it returns.
template <class Op, int kLanes, class C, size_t... t, size_t... p>
__device__ auto evaluate(
    unsigned keep,
    const C (&tensors)[Op::tensors][kLanes],
    const C (&parameters)[Op::parameters + 1][kLanes],
    int lane,
    std::index_sequence<t...>,
    std::index_sequence<p...>) {
  if constexpr (Op::reads_mask) {
    return Op::call(static_cast<bool>(keep >> lane & 1), tensors[t][lane]..., parameters[p][lane]...);
  } else {
    return ops::Values<C, 1>{Op::call(tensors[t][lane]..., parameters[p][lane]...)};
  }
}

// Computes one vector, of `count` elements, and stores it with the outputs at these offsets; calls visit(lane, values)
// for each element. Returns its bits of the mask, if one is written: by the outputs as they were rounded.
template <Access kAccess, bool kMask, class Op, class T, class F>
__device__ unsigned compute(
    const Operands<Op, T>& a,
    const int64_t (&offsets)[ops::operands<Op>],
    const Tensors<Op>& loaded,
    const Parameters<Op, T>& parameters,
    int count,
    const F& visit) {
  using C = at::opmath_type<T>;
  const bool whole = is_whole<kAccess> || count == kLanes<T>;
  C tensors[Op::tensors][kLanes<T>], results[Op::outputs][kLanes<T>];
#pragma unroll
  for (int t = 0; t < Op::tensors; ++t) unpack<T>(tensors[t], loaded.words[t]);
  const auto evaluate_lanes = [&]() {
#pragma unroll
    for (int i = 0; i < kLanes<T>; ++i) {
      const auto values = evaluate<Op>(
          loaded.keep, tensors, parameters.lanes, i, std::make_index_sequence<Op::tensors>(),
          std::make_index_sequence<Op::parameters>());
#pragma unroll
      for (int k = 0; k < Op::outputs; ++k) results[k][i] = values.value[k];
      if (is_whole<kAccess> || i < count) visit(i, values);
    }
  };
  if (Op::tensors > 1 && a.data[Op::first_tensor + 1] == nullptr) {
#pragma unroll
    for (int i = 0; i < kLanes<T>; ++i) tensors[Op::tensors - 1][i] = ops::nothing<C>();
    if constexpr (Op::sums == 0) evaluate_lanes(); // apart: the compiler then leaves out what adds nothing
  }
  if (Op::sums > 0 || Op::tensors == 1 || a.data[Op::first_tensor + 1] != nullptr) evaluate_lanes();
  unsigned bits = 0;
#pragma unroll
  for (int k = 0; k < Op::outputs; ++k) {
    const uint4 words = pack<T>(results[k]);
    if constexpr (kMask) {
      C rounded[kLanes<T>];
      unpack<T>(rounded, words);
#pragma unroll
      for (int i = 0; i < kLanes<T>; ++i) bits |= ((is_whole<kAccess> || i < count) && Op::keeps(rounded[i])) << i;
    }
    if (a.data[k] == nullptr) continue;
    char* data = a.data[k] + offsets[k];
    if (whole && (kAccess != Access::kAny || a.kind[k] == Kind::kVectors)) {
      *reinterpret_cast<uint4*>(data) = words;
    } else if (!is_whole<kAccess>) {
      const int64_t stride = kAccess == Access::kFlat ? sizeof(T) : a.element_strides[k];
      Vector<T> vector;
      memcpy(&vector, &words, sizeof(words));
#pragma unroll
      for (int i = 0; i < kLanes<T>; ++i) {
        if (i < count) *reinterpret_cast<T*>(data + i * stride) = vector.lane[i];
      }
    }
  }
  return bits;
}

} // namespace my_cuda_op::cuda
