// SPDX-License-Identifier: Apache-2.0
//
// The four numbers of a transformer that a KV cache needs.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// Head dimensions that every engine serves, for keys and values alike.
inline constexpr std::array<std::size_t, 5> supported_head_dims{64, 80, 96, 128, 256};

/// The shape of a transformer's KV cache; all layers have the same shape.
struct ModelShape {
  std::size_t layers = 0;
  std::size_t q_heads = 0;   ///< Query heads; a multiple of `kv_heads`.
  std::size_t kv_heads = 0;  ///< Query head h reads KV head h / queries_per_kv().
  std::size_t head_dim = 0;

  [[nodiscard]] constexpr std::size_t queries_per_kv() const { return q_heads / kv_heads; }
  [[nodiscard]] constexpr std::size_t kv_head_count() const { return layers * kv_heads; }
  friend constexpr bool operator==(const ModelShape&, const ModelShape&) = default;

  /// @throws ConfigError for zero layers or heads, q_heads that kv_heads does not divide, or a
  /// head_dim outside `supported_head_dims`.
  void validate() const {
    constexpr std::size_t most = std::size_t{1} << 20;  // far above any model: no overflow
    require(layers > 0 && layers <= most, "ModelShape: layers is ", layers, ", must be 1 to ", most);
    require(kv_heads > 0 && kv_heads <= most, "ModelShape: kv_heads is ", kv_heads,
            ", must be 1 to ", most);
    require(q_heads > 0 && q_heads <= most && q_heads % kv_heads == 0, "ModelShape: q_heads is ",
            q_heads, ", must be a positive multiple of kv_heads = ", kv_heads);
    require(std::ranges::count(supported_head_dims, head_dim) == 1, "ModelShape: head_dim is ",
            head_dim, ", must be 64, 80, 96, 128 or 256");
  }
};

}  // namespace kvpolicy
