// SPDX-License-Identifier: Apache-2.0
//
// What policies are called where they are written down: in plan files, saved caches and messages.
#pragma once

#include <string>
#include <string_view>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy {

/// What tells one policy type from another in a file: its name, its storage's, and where it has
/// them its scorer's and its summary's.
struct PolicyNames {
  std::string_view policy;
  std::string_view storage = "dense";
  std::string_view scorer = "snapkv";
  std::string_view summary = "mean";
  friend bool operator==(const PolicyNames&, const PolicyNames&) = default;

  template <class P>
  [[nodiscard]] static PolicyNames of() {
    PolicyNames names{.policy = P::name};
    if constexpr (requires { P::storage_type::name; }) names.storage = P::storage_type::name;
    if constexpr (requires { P::scorer_type::name; }) names.scorer = P::scorer_type::name;
    if constexpr (requires { P::summary_type::name; }) names.summary = P::summary_type::name;
    return names;
  }

  /// "chunk_retrieval over dense (summary minmax)"; what is the default goes without saying.
  [[nodiscard]] std::string shown() const {
    const PolicyNames plain{};
    std::string text = message(policy, " over ", storage);
    if (scorer != plain.scorer) text += message(" (scorer ", scorer, ')');
    if (summary != plain.summary) text += message(" (summary ", summary, ')');
    return text;
  }
};

}  // namespace kvpolicy
