#pragma once
// What the compiler needs to be told for loops as fast as stock PyTorch's: its baseline on x86 is SSE2.

#include <c10/util/Half.h>

#include <cstdint>

// The loader picks the widest of these that the machine has.
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_VERSIONS 1
#define MULTIVERSIONED __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define VERSION(target_) __attribute__((target(target_)))
#define INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#include <immintrin.h>
#else
#define HAS_VERSIONS 0
#define MULTIVERSIONED
#define VERSION(target_)
#define INDEPENDENT_ITERATIONS
#endif

namespace my_cuda_op::cpu {

template <class In, class Out>
MULTIVERSIONED void convert(const In* in, Out* out, int64_t n) {
  INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < n; ++i) out[i] = static_cast<Out>(in[i]);
}

// float16 and back: the compiler knows of no instruction for that, and writes ten.
VERSION("default")
static void convert(const c10::Half* in, float* out, int64_t n) {
  convert<c10::Half, float>(in, out, n);
}
VERSION("default")
static void convert(const float* in, c10::Half* out, int64_t n) {
  convert<float, c10::Half>(in, out, n);
}

#if HAS_VERSIONS
VERSION("arch=x86-64-v3")
static void convert(const c10::Half* in, float* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in + i))));
  }
  for (; i < n; ++i) out[i] = _cvtsh_ss(in[i].x);
}
VERSION("arch=x86-64-v3")
static void convert(const float* in, c10::Half* out, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
  }
  for (; i < n; ++i) out[i] = c10::Half(_cvtss_sh(in[i], _MM_FROUND_TO_NEAREST_INT), c10::Half::from_bits());
}
#endif

} // namespace my_cuda_op::cpu
