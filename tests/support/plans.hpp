// SPDX-License-Identifier: Apache-2.0
//
// Converts the models' description of a head to the library's plans.
#pragma once

#include <doctest/doctest.h>

#include <concepts>
#include <cstddef>
#include <optional>
#include <string_view>
#include <type_traits>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "support/policy_model.hpp"
#include "support/shipped_plan.hpp"

namespace test {

using kvpolicy::ModelShape;
using oracle::HeadSpec;
using oracle::Kind;
using oracle::Rank;

inline constexpr double rotary_theta = 10000.0;

inline kvpolicy::Codebook codebook_of(oracle::Codebook codebook) {
  switch (codebook) {
    case oracle::Codebook::even: return kvpolicy::Codebook::even;
    case oracle::Codebook::normal: return kvpolicy::Codebook::normal;
    case oracle::Codebook::fp8: return kvpolicy::Codebook::fp8;
    case oracle::Codebook::mxfp4: return kvpolicy::Codebook::mxfp4;
    case oracle::Codebook::nvfp4: return kvpolicy::Codebook::nvfp4;
  }
  return kvpolicy::Codebook::even;
}

template <class Config>
Config storage_config(const HeadSpec& spec) {
  Config config;
  if constexpr (std::convertible_to<Config, kvpolicy::ResidualConfig>) {
    config.bits = spec.bits;
    config.key_bits = spec.key_bits;
    config.value_bits = spec.value_bits;
    config.key_group = spec.key_group;
    config.value_group = spec.value_group;
    config.residual = spec.residual;
    config.key_hadamard = spec.key_hadamard;
    config.value_hadamard = spec.value_hadamard;
    config.halves = spec.halves;
    config.key_codebook = codebook_of(spec.key_codebook);
    config.value_codebook = codebook_of(spec.value_codebook);
    if (has_head_scale(config.key_codebook)) config.key_scale = spec.head_scale;
    if (has_head_scale(config.value_codebook)) config.value_scale = spec.head_scale;
    config.flush = spec.kivi ? kvpolicy::Flush::kivi : kvpolicy::Flush::steady;
  }
  return config;
}

template <class P>
typename P::Config policy_config(const HeadSpec& spec) {
  typename P::Config config;
  config.storage = storage_config<typename P::storage_type::Config>(spec);
  if constexpr (requires { config.sinks; }) config.sinks = spec.sinks;
  if constexpr (requires { config.recent; }) {
    config.recent = spec.recent;
    config.mask = spec.prefill_chunk_mask ? kvpolicy::Mask::prefill_chunk : kvpolicy::Mask::exact;
    if (spec.in_cache) config.rotary_in_cache = kvpolicy::RotaryConfig{.theta = rotary_theta};
  }
  if constexpr (requires { config.scorer; }) {
    config.budget = spec.budget;
    config.compress_from = spec.compress_from;
    config.compress_every = spec.compress_every;
    config.after_first_compress = spec.after_first;
    config.weigh_values = spec.weighed;
    if constexpr (requires { config.scorer.recent; }) config.scorer.recent = spec.window;
    if constexpr (requires { config.scorer.future; }) {
      config.scorer.observation_window = spec.draws;
      config.scorer.future = spec.future;
      config.scorer.sinks = 0;
      config.scorer.rotary = {.theta = rotary_theta};
    }
    if constexpr (requires { config.scorer.kernel; }) {
      config.scorer = {spec.window, spec.average ? kvpolicy::Pooling::average : kvpolicy::Pooling::max,
                       spec.kernel};
    }
    if constexpr (requires { config.scorer.votes = kvpolicy::Votes::largest; }) {
      if (spec.largest) config.scorer.votes = kvpolicy::Votes::largest;
    }
  }
  if constexpr (requires { config.chunk; }) {
    config.chunk = spec.chunk;
    config.budget = spec.budget;
    config.refresh_every = spec.refresh_every;
  }
  return config;
}

[[nodiscard]] inline std::string_view scorer_name(oracle::Rank rank) {
  switch (rank) {
    case oracle::Rank::tova: return "tova";
    case oracle::Rank::h2o: return "h2o";
    case oracle::Rank::key_norm: return "key_norm";
    case oracle::Rank::key_diff: return "key_diff";
    case oracle::Rank::expected: return "expected_attention";
    case oracle::Rank::snapkv: break;
  }
  return "snapkv";
}

/// Whether policy P can be a head that the spec describes.
template <class P>
bool is_policy_of(const HeadSpec& spec) {
  using Storage = typename P::storage_type;
  bool storage = spec.bits == 0;
  if constexpr (requires { Storage::key_granularity; }) {
    storage =
        spec.bits > 0 && spec.per_channel == (Storage::key_granularity == kvpolicy::Granularity::per_channel);
  }
  if constexpr (requires(typename P::Config c) { c.recent; }) return storage && spec.kind == Kind::window;
  if constexpr (requires(typename P::Config c) { c.scorer; }) {
    return storage && spec.kind == Kind::budget && P::scorer_type::name == scorer_name(spec.rank);
  }
  if constexpr (requires { typename P::summary_type; }) {
    return storage && spec.kind == Kind::retrieval && spec.min_max == (P::summary_type::vectors == 2);
  }
  return storage && spec.kind == Kind::full && P::name == "full";
}

/// The settings of the shipped policy that the spec describes; exactly one policy fits.
template <kvpolicy::Element E>
kvpolicy::HeadSettings<E> settings_of(const HeadSpec& spec) {
  std::optional<kvpolicy::HeadSettings<E>> found;
  for_each_shipped<E>([&]<class P>() {
    if (!is_policy_of<P>(spec)) return;
    REQUIRE(!found.has_value());
    found = policy_config<P>(spec);
  });
  REQUIRE(found.has_value());
  return *found;
}

template <kvpolicy::Element E>
kvpolicy::HeadPlan<E> plan_of(const ModelShape& shape, const std::vector<HeadSpec>& heads) {
  kvpolicy::HeadPlan<E> plan{shape};
  std::size_t i = 0;
  for (std::size_t l = 0; l < shape.layers; ++l) {
    for (std::size_t h = 0; h < shape.layer(l).kv_heads; ++h) plan.set(l, h, settings_of<E>(heads[i++]));
  }
  return plan;
}

}  // namespace test
