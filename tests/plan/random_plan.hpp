// SPDX-License-Identifier: Apache-2.0
//
// Plans over every shipped policy and storage with random settings, small enough that a few hundred
// tokens cross pages, windows, groups and residuals.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <random>

#include <kvpolicy/plan/shipped_policies.hpp>

#include "support/shipped_plan.hpp"

namespace kvpolicy::testing {

using Random = std::mt19937;

inline std::size_t pick(Random& random, std::size_t first, std::size_t last) {
  return std::uniform_int_distribution<std::size_t>{first, last}(random);
}

// Codebook that codes of this width may have, with their group and scale.
inline void randomize_codebook(Random& random, Encoding encoding, Codebook& codebook, std::size_t& group,
                               double& scale) {
  if (is_in_halves(encoding)) return;
  for (const Codebook one : {Codebook::normal, Codebook::fp8, Codebook::mxfp4, Codebook::nvfp4}) {
    if (codebook == Codebook::even && fits_codebook(one, bits_of(encoding)) && pick(random, 0, 2) == 0)
      codebook = one;
  }
  if (block_channels(codebook) > 0) group = 0;
  if (has_head_scale(codebook)) scale = 0.25 * static_cast<double>(pick(random, 1, 7));
}

template <class Config>
void randomize(Config& config, Random& random) {
  if constexpr (requires { config.bits; }) {
    constexpr std::array<std::size_t, 6> widths{2, 3, 4, 5, 6, 8};
    config.bits = widths[pick(random, 0, 5)];
    config.key_bits = pick(random, 0, 1) == 0 ? 0 : widths[pick(random, 0, 5)];
    config.value_bits = pick(random, 0, 1) == 0 ? 0 : widths[pick(random, 0, 5)];
    config.key_hadamard = pick(random, 0, 3) == 0;
    config.value_hadamard = pick(random, 0, 3) == 0;
    config.halves = (bits_of(config.key_encoding()) == 8 || bits_of(config.value_encoding()) == 8) &&
                    pick(random, 0, 1) == 0;
    config.key_group = std::size_t{16} << pick(random, 0, 1);
    config.value_group = std::size_t{16} << pick(random, 0, 2);
    constexpr bool by_token = Config::storage_type::key_granularity == Granularity::per_token;
    if (by_token)
      randomize_codebook(random, config.key_encoding(), config.key_codebook, config.key_group,
                         config.key_scale);
    randomize_codebook(random, config.value_encoding(), config.value_codebook, config.value_group,
                       config.value_scale);
    config.flush = pick(random, 0, 1) == 0 ? Flush::steady : Flush::kivi;
    config.residual = config.flush == Flush::kivi ? 32 * pick(random, 1, 4) : pick(random, 0, 100);
  }
  if constexpr (requires { config.sinks; }) config.sinks = pick(random, 0, 40);
  if constexpr (requires { config.recent; }) {
    config.recent = pick(random, 1, 150);
    config.mask = pick(random, 0, 1) == 0 ? Mask::exact : Mask::prefill_chunk;
    if (pick(random, 0, 2) == 0) {
      config.rotary_in_cache = RotaryConfig{.theta = 500000.0,
                                            .scaling = RotaryConfig::Scaling::llama3,
                                            .factor = 8.0 + 1.0 / 3.0,
                                            .low_freq_factor = 1.0,
                                            .high_freq_factor = 4.0,
                                            .original_max_position = 8192.0};
    }
  }
  if constexpr (requires { config.scorer; }) {
    config.budget = pick(random, 0, 120);
    if constexpr (requires { config.scorer.sinks; }) {
      config.scorer.sinks = pick(random, 0, std::min<std::size_t>(config.budget, 6));
      config.scorer.observation_window = pick(random, 1, 20);
      config.weigh_values = pick(random, 0, 1) == 0;
    }
    if (pick(random, 0, 2) == 0) config.compress_from = pick(random, 0, 200);
    if constexpr (requires { config.scorer.kernel; }) {
      config.scorer = {
          .observation_window = pick(random, 1, 20),
          .pooling = pick(random, 0, 1) == 0 ? Pooling::max : Pooling::average,
          .kernel = 2 * pick(random, 0, 4) + 1,
          .votes = pick(random, 0, 3) == 0 ? Votes::largest : Votes::mean,
          .prior_share = pick(random, 0, 3) == 0 ? 0.25 * static_cast<double>(pick(random, 1, 4)) : 0.0};
      config.weigh_values = pick(random, 0, 3) == 0;
      if (config.weigh_values) config.unweighed_share = 0.25 * static_cast<double>(pick(random, 0, 4));
    } else if constexpr (requires { config.scorer.recent; }) {
      config.scorer.recent = pick(random, 0, 30);
      if constexpr (requires { config.scorer.votes = Votes::largest; }) {
        if (pick(random, 0, 2) == 0) config.scorer.votes = Votes::largest;
      }
    }
  }
  if constexpr (requires { config.refresh_every; }) {
    config.chunk = 32 * pick(random, 1, 2);
    config.budget = config.chunk * pick(random, 1, 5);
    config.refresh_every = pick(random, 0, 50);
  }
  if constexpr (requires { config.storage; }) randomize(config.storage, random);
}

/// The number of shipped policies.
inline constexpr std::size_t policy_count = [] {
  std::size_t count = 0;
  ::test::for_each_shipped<float>([&]<class P>() { ++count; });
  return count;
}();

/// Random settings of policy number `policy` of ShippedPlan.
template <Element E>
HeadSettings<E> random_settings(Random& random, std::size_t policy) {
  std::optional<HeadSettings<E>> settings;
  std::size_t number = 0;
  ::test::for_each_shipped<E>([&]<class P>() {
    if (number++ != policy) return;
    typename P::Config config;
    randomize(config, random);
    settings = config;
  });
  return *settings;
}

template <class Plan>
Plan random_plan(const ModelShape& shape, Random& random) {
  Plan plan{shape};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      const std::size_t policy = pick(random, 0, policy_count - 1);
      plan.set(layer, head, random_settings<typename Plan::element_type>(random, policy));
    }
  }
  return plan;
}

}  // namespace kvpolicy::testing
