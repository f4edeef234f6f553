#pragma once
// Masks: one bit an element in memory, a number of its own in a loop. Eight at a time: the compiler does not see how.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "convert_cpu.h"

namespace my_cuda_op::cpu {

// (std::endian is of C++20, and torch 2.11 compiles extensions as C++17.)
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "byte k of a word must be the one at address k");

// Byte k, which is 0 or 1, becomes bit k.
inline uint8_t collect(uint64_t bytes) {
  return bytes * 0x0102040810204080u >> 56; // moves byte k to bit 56 + k
}

// The bits of n elements, `stride` apart, from that number `first` on: not 0 where set. May write up to a multiple of
// eight.
template <class Flag>
MULTIVERSIONED void unpack_bits(const uint8_t* mask, int64_t first, int64_t stride, int64_t n, Flag* keep) {
  if (stride != 1) {
    for (int64_t i = 0; i < n; ++i) {
      const int64_t bit = first + i * stride;
      keep[i] = mask[bit >> 3] >> (bit & 7) & 1;
    }
    return;
  }
  mask += first >> 3;
  const int64_t shift = first & 7, last = (shift + n - 1) >> 3;
  for (int64_t i = 0; i < n; i += 8) {
    const int64_t byte = i >> 3;
    unsigned bits = mask[byte];
    if (shift > 0) bits = (bits | mask[std::min(byte + 1, last)] << 8) >> shift;
    for (int k = 0; k < 8; ++k) keep[i + k] = bits & 1u << k;
  }
}

// The way back, from bools to bits in whole bytes.
inline void pack_bits(const bool* keep, int64_t n, uint8_t* mask) {
  for (int64_t i = 0; i < n; i += 8) {
    uint64_t bools = 0;
    std::memcpy(&bools, keep + i, n - i < 8 ? n - i : 8);
    mask[i / 8] = collect(bools);
  }
}

} // namespace my_cuda_op::cpu
