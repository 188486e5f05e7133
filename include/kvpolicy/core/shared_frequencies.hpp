// SPDX-License-Identifier: Apache-2.0
//
// Shares one list of rotary frequencies between the many heads that read the same one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include <kvpolicy/core/rotary.hpp>

namespace kvpolicy::detail {

/// Like `inverse_frequencies`, but calls with the same arguments return the same list for as long as
/// somebody holds it. Thread-safe.
/// @throws ConfigError as inverse_frequencies, std::bad_alloc
[[nodiscard]] inline std::shared_ptr<const std::vector<float>> shared_frequencies(const RotaryConfig& config,
                                                                                  std::size_t head_dim) {
  struct Known {
    RotaryConfig config;
    std::size_t head_dim;
    std::weak_ptr<const std::vector<float>> list;
  };
  static std::mutex mutex;
  static std::vector<Known> known;
  const std::lock_guard lock{mutex};
  for (const Known& one : known) {
    if (one.head_dim != head_dim || !(one.config == config)) continue;
    if (auto list = one.list.lock()) return list;
  }
  std::erase_if(known, [](const Known& one) { return one.list.expired(); });
  auto list = std::make_shared<const std::vector<float>>(inverse_frequencies(config, head_dim));
  known.push_back({config, head_dim, list});
  return list;
}

}  // namespace kvpolicy::detail
