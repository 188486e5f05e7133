// SPDX-License-Identifier: Apache-2.0
//
// What is measured: requests as they arrive, and the server that they meet.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numbers>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>

#include "common/random.hpp"
#include "serve/scheduler.hpp"

namespace kvpolicy::bench {

using Json = nlohmann::ordered_json;

inline constexpr std::size_t mebibyte = std::size_t{1} << 20;

/// Uniform in [0, 1), the same on every machine.
[[nodiscard]] inline double uniform(tools::Random& random) {
  return static_cast<double>(random.below(std::size_t{1} << 53)) * 0x1p-53;
}

/// Lengths as they are in traffic: most are short, a few are long.
struct LogNormal {
  double median = 256;
  double sigma = 0.6;  ///< of the logarithm
  std::size_t least = 32;
  std::size_t most = 1024;

  /// The same with another median, and with limits that follow it: four times as long, unless told otherwise.
  /// @throws ConfigError if no text may be as long as the median
  [[nodiscard]] LogNormal around(double own, std::size_t longest = 0) const {
    const auto middle = static_cast<std::size_t>(own);
    LogNormal other = *this;
    other.median = own;
    other.least = std::min(least, middle);
    other.most = longest > 0 ? longest : 4 * middle;
    require(other.most >= middle, "the longest of these texts has ", other.most,
            " tokens, must have at least the median's ", middle);
    return other;
  }

  [[nodiscard]] std::size_t draw(tools::Random& random) const {
    const double radius = std::sqrt(-2 * std::log(1 - uniform(random)));
    const double normal = radius * std::cos(2 * std::numbers::pi * uniform(random));
    const double length = std::round(median * std::exp(sigma * normal));
    return static_cast<std::size_t>(
        std::clamp(length, static_cast<double>(least), static_cast<double>(most)));
  }
  [[nodiscard]] Json json() const {
    return {{"median", median}, {"sigma", sigma}, {"least", least}, {"most", most}};
  }
};

/// A request is one of a few shared texts, a text of its own and a question; its answer has a drawn length.
struct Traffic {
  std::vector<std::size_t> systems{1024, 2048,
                                   4096};  ///< tokens of the shared texts; none: nothing is shared
  LogNormal own{.median = 256, .sigma = 0.6, .least = 32, .most = 1024};
  LogNormal answer{.median = 64, .sigma = 0.7, .least = 32, .most = 256};
  std::uint64_t seed = 1;

  [[nodiscard]] Json json() const {
    return {{"systems", systems}, {"own", own.json()}, {"answer", answer.json()}, {"seed", seed}};
  }
};

/// Poisson arrivals: when each of `count` requests comes, at `rate` a second.
[[nodiscard]] inline std::vector<double> poisson_arrivals(std::size_t count, double rate,
                                                          std::uint64_t seed) {
  tools::Random random{seed, count, 1};
  std::vector<double> times(count);
  double time = 0;
  for (double& one : times) {
    time -= std::log(1 - uniform(random)) / rate;
    one = time;
  }
  return times;
}

struct Settings {
  std::string model;       ///< a folder, or "llama3"
  std::size_t layers = 0;  ///< of llama3; 0: all 32
  std::vector<std::string> plans;
  Traffic traffic;
  std::size_t memory = 0;  ///< MiB; 0: as the model suggests
  std::size_t swap_memory = 1024;
  std::size_t step_tokens = 256;
  std::size_t max_running = 64;
  std::size_t threads = 0;
  std::size_t requests = 0;  ///< of open-loop traffic
  std::vector<double> rates;
  std::size_t saturate = 0;
  std::size_t unshared = 0;  // so many long texts that share nothing
  Traffic long_texts{.systems = {},
                     .own = {.median = 4096, .sigma = 0.3, .least = 1024, .most = 8192},
                     .answer = {.median = 256, .sigma = 0.5, .least = 64, .most = 1024}};
  double own = 0, answer = 0;  // medians; 0: as the traffic has them
  std::size_t own_most = 0;    // 0: as the median suggests
  bool batch = false;
  bool prefix = false;
  double hours = 0;
  bool quick = false;
  bool smoke = false;
  std::string json;

  [[nodiscard]] serve::SchedulerOptions scheduler(std::size_t bytes) const {
    serve::SchedulerOptions options;
    options.memory = bytes;
    options.swap_memory = swap_memory * mebibyte;
    options.step_tokens = step_tokens;
    options.max_running = max_running;
    // Whoever comes is measured: a queue that ends would only hide how long one waits.
    options.max_waiting = std::size_t{1} << 20;
    return options;
  }
};

}  // namespace kvpolicy::bench
