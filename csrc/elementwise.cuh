#pragma once
// What the CUDA access patterns of map.cuh and sum.cuh share: how a vector of elements is loaded, computed and stored,
// and the one <<<>>>, with its device guard, current stream and launch check. An op has no launch code of its own.

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstring>
#include <utility>

#include "dtypes.h"
#include "layout.cuh"

namespace my_cuda_op::cuda {

template <class Arguments>
void launch_kernel(c10::Device device, dim3 grid, void (*kernel)(Arguments), const Arguments& arguments) {
  const c10::cuda::CUDAGuard guard(device); // else a kernel for cuda:1 runs on cuda:0
  kernel<<<grid, kThreads, 0, c10::cuda::getCurrentCUDAStream(device.index())>>>(arguments);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

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
// Gives every lane what is in the first one, later than load_first has loaded it, for the same reason.
template <class C, int kCount>
__device__ void repeat(C (&lanes)[kCount]) {
#pragma unroll
  for (int i = 1; i < kCount; ++i) lanes[i] = lanes[0];
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

template <class T>
__device__ uint4 load_first(const char* data) {
  Vector<T> vector; // nothing reads the others
  vector.lane[0] = *reinterpret_cast<const T*>(data);
  return as_words(vector);
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
    if (Op::has_residual && t == 1 && a.data[k] == nullptr) {
      loaded.words[t] = make_uint4(0, 0, 0, 0); // which nothing reads
    } else if (kAccess == Access::kAny) {
      loaded.words[t] = load<T>(data, a.kind[k], a.element_strides[k], count);
    } else if (whole && (kAccess <= Access::kAlike || a.kind[k] == Kind::kVectors)) {
      loaded.words[t] = *reinterpret_cast<const uint4*>(data);
    } else if (kAccess == Access::kRows) {
      loaded.words[t] = load_first<T>(data);
    } else {
      loaded.words[t] = load<T>(data, Kind::kStrided, sizeof(T), count);
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
    const bool wide = std::is_same_v<T, C> || a.template is_wide<kAccess>(k);
    if (a.kind[k] == Kind::kAbsent) {
      loaded.lanes[p][0] = a.numbers[p];
    } else if (is_uniform<kAccess> || a.kind[k] == Kind::kUniform) {
      if (wide) {
        loaded.lanes[p][0] = *reinterpret_cast<const C*>(data);
      } else {
        loaded.words[p] = load_first<T>(data);
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
    const bool wide = std::is_same_v<T, C> || a.template is_wide<kAccess>(k) || a.kind[k] == Kind::kAbsent;
    if (!wide) unpack<T>(loaded.lanes[p], loaded.words[p]);
    if (is_uniform<kAccess> || a.kind[k] == Kind::kAbsent || a.kind[k] == Kind::kUniform) {
      repeat(loaded.lanes[p]);
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
  for (int t = 0; t < Op::tensors; ++t) {
    unpack<T>(tensors[t], loaded.words[t]);
    if (kAccess == Access::kRows && a.kind[Op::first_tensor + t] == Kind::kUniform) repeat(tensors[t]);
  }
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
  // Each apart: the compiler then leaves out what adds nothing.
  if (Op::has_residual && a.data[Op::first_tensor + 1] == nullptr) {
#pragma unroll
    for (int i = 0; i < kLanes<T>; ++i) tensors[Op::tensors - 1][i] = ops::nothing<C>();
    evaluate_lanes();
  } else {
    evaluate_lanes();
  }
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
