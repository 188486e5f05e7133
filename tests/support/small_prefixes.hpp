// SPDX-License-Identifier: Apache-2.0
//
// Three prefixes of one text, under a small plan (small_cache.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include <kvpolicy/cache/saved_prefixes.hpp>

#include "small_cache.hpp"

namespace test {

using SmallPrefixes = kvpolicy::PrefixCache<kvpolicy::float16>;

[[nodiscard]] inline std::vector<std::int32_t> small_tokens(std::size_t count) {
  std::vector<std::int32_t> tokens(count);
  std::iota(tokens.begin(), tokens.end(), 0);
  return tokens;
}

inline void keep_small_prefixes(SmallPrefixes& prefixes, const SmallPlan& plan = small_plan()) {
  SmallCache cache{plan, small_options()};
  for (const std::size_t tokens : {16U, 18U, 6U}) {
    small_step(cache, tokens);
    static_cast<void>(prefixes.keep(cache, small_tokens(cache.tokens())));
  }
}

[[nodiscard]] inline std::string saved_prefixes(const SmallPrefixes& prefixes,
                                                const SmallPlan& plan = small_plan()) {
  std::ostringstream stream;
  kvpolicy::save(prefixes, plan, stream);
  return stream.str();
}
inline void load_prefixes(SmallPrefixes& prefixes, const std::string& bytes,
                          const SmallPlan& plan = small_plan()) {
  std::istringstream stream{bytes};
  kvpolicy::load(prefixes, plan, stream);
}

}  // namespace test
