// SPDX-License-Identifier: Apache-2.0
//
// The cache over the compiled engine, and plans from files over every policy that ships: declared
// here, compiled once into the library (target kvpolicy::compiled). A file that reads plans and steps a
// cache so compiles in seconds. Plans of your own policies work as they do without the library: the
// policies are then compiled in your file.
#pragma once

#include <string>
#include <string_view>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/compiled/engine.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy {

extern template class KvCache<float, compiled::Engine>;
extern template class KvCache<half, compiled::Engine>;
extern template class KvCache<bfloat16, compiled::Engine>;

namespace compiled {

/// A sequence over the compiled engine.
template <Element E = float>
using KvCache = kvpolicy::KvCache<E, Engine>;

/// `io::parse_plan` over every policy that ships; E is float, half or bfloat16.
/// @throws FormatError
template <Element E = float>
[[nodiscard]] HeadPlan<E> parse_plan(std::string_view text, std::string_view origin = "plan");
/// `io::load_plan` over the same.
/// @throws FormatError
template <Element E = float>
[[nodiscard]] HeadPlan<E> load_plan(const std::string& path);
/// `io::format_plan`: the text of a plan file.
/// @throws ConfigError for a policy that cannot stand in a file
template <Element E>
[[nodiscard]] std::string format_plan(const HeadPlan<E>& plan);

}  // namespace compiled
}  // namespace kvpolicy
