// SPDX-License-Identifier: Apache-2.0
//
// How a plan's name says that rows are quantised: "int4:128,keys=token", "headkv+k8v4:128,group=16".
#pragma once

#include <cstddef>
#include <string_view>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/low_bits.hpp>

#include "plan_name.hpp"

namespace kvpolicy::tools {

/// The bits that "int4" or "k8v4" says. @throws ConfigError for any other word
[[nodiscard]] inline io::LowBits low_bits(std::string_view storage) {
  const io::LowBits bits = io::LowBits::named(storage);
  require(static_cast<bool>(bits), "'", storage,
          "' is not int8, int6, int5, int4, int3, int2, or bits of keys and of values such as k8v4");
  return bits;
}

namespace detail {

inline void take_hadamard(PlanName& spec, ResidualConfig& rows) {
  const auto which = spec.choice("hadamard", io::Hadamard::none);
  rows.key_hadamard = rotates_keys(which);
  rows.value_hadamard = rotates_values(which);
}

}  // namespace detail

/// How rows are quantised that may be dropped one by one. Takes `group`, `residual` and `hadamard` from the name.
[[nodiscard]] inline ResidualConfig row_format(PlanName& spec, const ModelShape& shape,
                                               std::size_t residual) {
  ResidualConfig rows = io::LowBitFormat::of_rows(low_bits(spec.storage), shape, residual).storage;
  rows.key_group = rows.value_group = spec.count("group", rows.value_group);
  require(rows.key_group > 0, "group is 0, must be at least 1");
  rows.residual = spec.count("residual", residual);
  detail::take_hadamard(spec, rows);
  return rows;
}

/// How heads that keep every row quantise them as `storage` says. Takes `keys`, `key_group`, `group`,
/// `residual` and `hadamard` from the name.
[[nodiscard]] inline io::LowBitFormat text_format(PlanName& spec, const ModelShape& shape,
                                                  std::string_view storage) {
  const io::LowBits bits = low_bits(storage);
  io::LowBitFormat text = io::LowBitFormat::of_text(bits, shape);
  ResidualConfig& rows = text.storage;
  const io::KeyScales keys = spec.choice("keys", text.keys);
  if (keys == io::KeyScales::token) {
    if (keys != text.keys) rows = io::LowBitFormat::of_rows(bits, shape, rows.residual).storage;
    rows.value_group = rows.key_group = spec.count("group", rows.value_group);
  } else {
    if (keys != text.keys) rows.key_group = 64;
    rows.key_group = spec.count("key_group", rows.key_group);
    rows.value_group = spec.count("group", rows.value_group);
    require(rows.key_group > 0, "key_group is 0, must be at least 1");
  }
  require(rows.value_group > 0, "group is 0, must be at least 1");
  text.keys = keys;
  rows.residual = spec.count("residual", rows.residual);
  detail::take_hadamard(spec, rows);
  return text;
}

}  // namespace kvpolicy::tools
