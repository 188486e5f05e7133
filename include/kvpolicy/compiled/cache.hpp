// SPDX-License-Identifier: Apache-2.0
//
// The cache with the compiled engine, and plans from files over every shipped policy. Both are declared
// here and compiled once, in the library (target kvpolicy::compiled), so a file that reads plans and steps
// a cache compiles in seconds. Plans with policies of your own work as without the library: those policies
// are compiled in your file.
#pragma once

#include <string>
#include <string_view>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/compiled/engine.hpp>
#include <kvpolicy/core/type_tag.hpp>
#include <kvpolicy/plan/head_plan.hpp>

#if !KVPOLICY_RTTI
#error \
    "kvpolicy: the compiled library is built with RTTI, by which it knows policies; compile without -fno-rtti, or include the headers of kvpolicy::cpu"
#endif

namespace kvpolicy {

extern template class detail::LayerCalls<float, compiled::Engine>;
extern template class detail::LayerCalls<float16, compiled::Engine>;
extern template class detail::LayerCalls<bfloat16, compiled::Engine>;
extern template class KvCache<float, compiled::Engine>;
extern template class KvCache<float16, compiled::Engine>;
extern template class KvCache<bfloat16, compiled::Engine>;

namespace compiled {

/// A cache of one sequence with the compiled engine.
template <Element E = float>
using KvCache = kvpolicy::KvCache<E, Engine>;

/// `io::parse_plan` over every shipped policy; E is float, float16 or bfloat16.
/// @throws FormatError
template <Element E = float>
[[nodiscard]] HeadPlan<E> parse_plan(std::string_view text, std::string_view origin = "plan");
/// `io::load_plan` over every shipped policy.
/// @throws FormatError
template <Element E = float>
[[nodiscard]] HeadPlan<E> load_plan(const std::string& path);
/// `io::named_plan` over every shipped policy: the plan that a short name such as "int4" names.
/// @throws ConfigError, FormatError
template <Element E = float>
[[nodiscard]] HeadPlan<E> named_plan(std::string_view name, const ModelShape& shape);
/// `io::format_plan`: writes the text of a plan file.
/// @throws ConfigError for a policy that cannot be written to a file
template <Element E>
[[nodiscard]] std::string format_plan(const HeadPlan<E>& plan);

}  // namespace compiled
}  // namespace kvpolicy
