// SPDX-License-Identifier: Apache-2.0
//
// Quantised rows as integer products, if the target has the instructions for them. Otherwise this header
// declares the same names without effect, and all rows are decoded to float first.
#pragma once

#include <cstddef>

#include <kvpolicy/cpu/prefetch-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/x86/integer_pairs-inl.hpp>

#if KVPOLICY_CPU_PAIR_PRODUCTS
#include <kvpolicy/cpu/integer_keys-inl.hpp>
#include <kvpolicy/cpu/integer_values-inl.hpp>
#else
namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {

struct IntegerKeys {
  [[nodiscard]] static std::size_t scratch_floats(std::size_t, std::size_t) { return 0; }
  IntegerKeys(std::size_t, std::size_t, float*) {}
  void set_queries(const float*) {}
  bool compute_logits(const RowTileSide&, std::size_t, float*, std::size_t, const Prefetch&) { return false; }
};

struct IntegerValues {
  [[nodiscard]] static std::size_t scratch_floats(std::size_t, std::size_t) { return 0; }
  IntegerValues(std::size_t, std::size_t, float*) {}
  bool add(const RowTileSide&, std::size_t, const float*, std::size_t, const float*, float*,
           const Prefetch&) {
    return false;
  }
  void flush(float*) {}
};

}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
#endif
