#pragma once
// The one switch over dtypes: dispatch<Op>(dtype, f) calls f(T{}) with the storage type T.

#include <ATen/Dispatch_v2.h>
#include <ATen/OpMathType.h>
#include <c10/core/ScalarType.h>

#include "ops.h"

namespace my_cuda_op {

template <class Op, class F>
void dispatch(c10::ScalarType dtype, const F& f) {
  using namespace c10;
  AT_DISPATCH_V2(
      dtype, Op::name, AT_WRAP([&] {
        if constexpr (Op::template takes<at::opmath_type<scalar_t>>) {
          f(scalar_t{});
        } else {
          TORCH_CHECK_NOT_IMPLEMENTED(
              false, Op::name, ": the dtype must be one that it is defined for, got ", toString(dtype));
        }
      }),
      AT_EXPAND(AT_ALL_TYPES), AT_EXPAND(AT_COMPLEX_TYPES), AT_EXPAND(AT_BAREBONES_UNSIGNED_TYPES), kBool, kHalf,
      kBFloat16, kComplexHalf);
}

} // namespace my_cuda_op
