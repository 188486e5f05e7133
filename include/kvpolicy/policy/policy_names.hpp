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
  std::string_view scorer = {};   ///< empty: the policy has none; in a file, the usual one
  std::string_view summary = {};  ///< the same

  static constexpr std::string_view nameless = "a policy without a name";
  static constexpr std::string_view usual_scorer = "snapkv";
  static constexpr std::string_view usual_summary = "mean";

  template <class P>
  [[nodiscard]] static PolicyNames of() {
    PolicyNames names{.policy = P::name};
    if constexpr (requires { P::storage_type::name; }) names.storage = P::storage_type::name;
    if constexpr (requires { P::scorer_type::name; }) names.scorer = P::scorer_type::name;
    if constexpr (requires { P::summary_type::name; }) names.summary = P::summary_type::name;
    return names;
  }

  /// "chunk_retrieval over dense (summary minmax)"; what is usual goes without saying.
  [[nodiscard]] std::string shown() const {
    std::string text = message(policy, " over ", storage);
    if (!is_usual(scorer, usual_scorer)) text += message(" (scorer ", scorer, ')');
    if (!is_usual(summary, usual_summary)) text += message(" (summary ", summary, ')');
    return text;
  }

  friend bool operator==(const PolicyNames& a, const PolicyNames& b) {
    return a.policy == b.policy && a.storage == b.storage &&
           either(a.scorer, usual_scorer) == either(b.scorer, usual_scorer) &&
           either(a.summary, usual_summary) == either(b.summary, usual_summary);
  }

 private:
  [[nodiscard]] static std::string_view either(std::string_view name, std::string_view usual) {
    return name.empty() ? usual : name;
  }
  [[nodiscard]] static bool is_usual(std::string_view name, std::string_view usual) {
    return either(name, usual) == usual;
  }
};

}  // namespace kvpolicy
