// SPDX-License-Identifier: Apache-2.0
//
// From a policy's config to the plain numbers that the kernels know (HeadView in
// kernels/head.cuh). The only file of the CUDA part that knows policies by name. A policy of your
// own runs on the device if what it keeps and reads can be said in these numbers: specialise
// `DeviceHead` for it.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <optional>
#include <string_view>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

namespace kvpolicy::cuda {

/// What a KV head keeps and reads, whatever its policy is called.
struct HeadSettings {
  // Rows that live: all of them, or the first `sinks` and the latest `recent`.
  std::size_t sinks = 0;
  std::size_t recent = 0;  ///< 0: all
  bool chunk_mask = false;
  std::optional<RotaryConfig> rotary_in_cache = {};
  // How rows lie once they have left the residual.
  Encoding encoding = Encoding::float32;  ///< float32: as they came
  bool key_per_channel = false;
  std::size_t key_group = 0;
  std::size_t value_group = 0;
  std::size_t residual = 0;
  // Dropping rows by the attention they got.
  bool compresses = false;
  std::size_t budget = 0;
  std::size_t compress_from = 0;  ///< a text of fewer tokens stays whole
  std::size_t window = 0;  ///< latest queries that vote
  Pooling pooling = Pooling::max;
  std::size_t pooled_rows = 1;
  std::size_t compress_every = 0;
  // Choosing which chunks to read.
  std::size_t chunk = 0;  ///< 0: reads everything
  std::size_t chosen_rows = 0;
  std::size_t refresh_every = 0;
  bool min_max = false;

  friend bool operator==(const HeadSettings&, const HeadSettings&) = default;

  [[nodiscard]] bool is_packed() const { return encoding >= Encoding::uint8; }

  /// @throws ConfigError for what the kernels do not serve.
  void validate(std::size_t head_dim) const {
    if (is_packed()) {
      require(head_dim == 64 || head_dim == 128, "cuda: quantised rows have kernels for head_dim 64 "
              "and 128, not ", head_dim);
      const auto fits = [&](std::size_t group) { return group % 8 == 0 && head_dim % group == 0; };
      require(key_per_channel ? key_group == 16 || key_group == 32 || key_group == 64
                              : fits(key_group),
              "cuda: key_group is ", key_group, key_per_channel
                  ? ", must be 16, 32 or 64 rows"
                  : ", must be a multiple of 8 channels that divides head_dim");
      require(fits(value_group), "cuda: value_group is ", value_group,
              ", must be a multiple of 8 channels that divides head_dim = ", head_dim);
      require(chunk == 0 || chunk == 16 || chunk == 32 || chunk == 64, "cuda: chunk is ", chunk,
              "; over quantised rows it must be 16, 32 or 64");
    }
    require(!compresses || (window >= 1 && window <= 64), "cuda: window is ", window,
            " queries, must be 1 to 64");
    require(!compresses || pooled_rows <= 65, "cuda: the pooling kernel is ", pooled_rows,
            " rows, must be at most 65");
    constexpr std::size_t most = std::size_t{1} << 30;
    const auto largest = std::max({sinks, recent, residual, budget, chunk, chosen_rows});
    require(largest <= most, "cuda: a head keeps or reads ", largest,
            " rows, must be at most 2^30");
  }
};

/// How the rows of a storage lie on the device.
template <class Storage>
[[nodiscard]] HeadSettings describe_storage(const typename Storage::Config& config,
                                            std::size_t head_dim) {
  HeadSettings settings;
  if constexpr (std::convertible_to<typename Storage::Config, ResidualConfig>) {
    require(config.flush == Flush::steady, "cuda: kivi's flush has no kernel; use Flush::steady, "
            "which keeps at least as many rows exact");
    settings.encoding = config.bits == 8   ? Encoding::uint8
                        : config.bits == 4 ? Encoding::uint4
                                           : Encoding::uint2;
    settings.key_per_channel = Storage::key_granularity == Granularity::per_channel;
    const std::size_t whole = settings.key_per_channel ? 32 : head_dim;
    settings.key_group = config.key_group == 0 ? whole : config.key_group;
    settings.value_group = config.value_group == 0 ? head_dim : config.value_group;
    settings.residual = config.residual;
  }
  return settings;
}

/// `describe(config, head_dim)` of a policy.
template <class Policy>
struct DeviceHead;

template <class Storage>
struct DeviceHead<FullCache<Storage>> {
  static HeadSettings describe(const typename FullCache<Storage>::Config& config,
                               std::size_t head_dim) {
    return describe_storage<Storage>(config.storage, head_dim);
  }
};

template <class Storage>
struct DeviceHead<SinkRecentCache<Storage>> {
  static HeadSettings describe(const typename SinkRecentCache<Storage>::Config& config,
                               std::size_t head_dim) {
    HeadSettings settings = describe_storage<Storage>(config.storage, head_dim);
    settings.sinks = config.sinks;
    settings.recent = config.recent;
    settings.chunk_mask = config.mask == Mask::chunk;
    settings.rotary_in_cache = config.rotary_in_cache;
    return settings;
  }
};

template <class Storage>
struct DeviceHead<HeadBudgetCache<Storage, SnapKvScorer>> {
  static HeadSettings describe(const typename HeadBudgetCache<Storage, SnapKvScorer>::Config& config,
                               std::size_t head_dim) {
    require(!config.share_in_layer, "cuda: heads that share a layer's budget (share_in_layer) have no "
            "kernel; give every head its own, or run the plan on the host");
    require(!config.after_first_compress || config.compress_every == 0,
            "cuda: after_first_compress has no kernel; set compress_every behind the prompt, or run the "
            "plan on the host");
    HeadSettings settings = describe_storage<Storage>(config.storage, head_dim);
    settings.compresses = true;
    settings.budget = config.budget;
    settings.compress_from = config.compress_from;
    settings.window = config.scorer.window;
    settings.pooling = config.scorer.pooling;
    settings.pooled_rows = config.scorer.kernel;
    settings.compress_every = config.compress_every;
    return settings;
  }
};

/// There are kernels for SnapKV's rank alone; a plan with another scorer compiles, and is refused.
template <class Storage, class Scorer>
struct DeviceHead<HeadBudgetCache<Storage, Scorer>> {
  static HeadSettings describe(const typename HeadBudgetCache<Storage, Scorer>::Config&,
                               std::size_t /*head_dim*/) {
    fail<ConfigError>("cuda: heads whose rows are ranked by ", Scorer::name,
                      " have no kernel; rank by ", SnapKvScorer::name,
                      ", or run the plan on the host");
  }
};

template <class Storage, class Summary>
struct DeviceHead<ChunkRetrievalCache<Storage, Summary>> {
  static_assert(std::same_as<Summary, MeanKey> || std::same_as<Summary, MinMaxKey>,
                "cuda: chunks are summarised by MeanKey or MinMaxKey on the device");
  static HeadSettings describe(
      const typename ChunkRetrievalCache<Storage, Summary>::Config& config, std::size_t head_dim) {
    HeadSettings settings = describe_storage<Storage>(config.storage, head_dim);
    settings.chunk = config.chunk;
    settings.chosen_rows = config.budget;
    settings.refresh_every = config.refresh_every;
    settings.min_max = std::same_as<Summary, MinMaxKey>;
    return settings;
  }
};

/// One head of a plan. @throws ConfigError for what the kernels do not serve.
template <class Plan>
[[nodiscard]] HeadSettings describe(const Plan& plan, std::size_t layer, std::size_t head) {
  HeadSettings settings;
  const std::size_t head_dim = plan.shape().head_dim;
  Plan::visit(plan.at(layer, head), [&]<class P>(const typename P::Config& config) {
    static_assert(requires { DeviceHead<P>::describe(config, head_dim); },
                  "cuda: this policy does not say how it lies on a device; specialise "
                  "kvpolicy::cuda::DeviceHead for it");
    settings = DeviceHead<P>::describe(config, head_dim);
  });
  settings.validate(head_dim);
  return settings;
}

}  // namespace kvpolicy::cuda
