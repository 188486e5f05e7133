// SPDX-License-Identifier: Apache-2.0
//
// All that a policy must have, but for the number of its rows.
// expect: seen.rows()
#include <cstddef>

#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_settings.hpp>

using Full = kvpolicy::FullCache<kvpolicy::DenseStorage<float>>;

struct Own : Full {
  struct Config : Full::Config {
    using policy_type = Own;
  };
  using Full::Full;
  std::size_t rows() const = delete;
};

const kvpolicy::HeadSettings<float> settings = Own::Config{};
