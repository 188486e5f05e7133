// SPDX-License-Identifier: Apache-2.0
//
// What a head with some settings keeps, as text: "every row in 4 bits but for the latest 128", "the
// first 16 rows and the latest 128". A policy of one's own prints by its name.
#pragma once

#include <concepts>
#include <cstddef>
#include <string>
#include <string_view>
#include <type_traits>
#include <variant>

#include <fmt/format.h>

#include <kvpolicy/format/bytes.hpp>
#include <kvpolicy/format/storage.hpp>
#include <kvpolicy/policy/chunk_retrieval_cache.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

namespace kvpolicy {

/// Settings of a policy, which name it (`policy_type`): what kvpolicy::format prints.
template <class C>
concept PolicyConfig = std::same_as<typename C::policy_type::Config, C>;

namespace detail {

template <class Named>
[[nodiscard]] std::string name_or(std::string_view otherwise) {
  if constexpr (requires { std::string_view{Named::name}; }) {
    return std::string{std::string_view{Named::name}};
  } else {
    return std::string{otherwise};
  }
}

// " in 4 bits …" behind what is stored so; nothing for exact rows.
template <class Config>
[[nodiscard]] std::string precision_text(const Config& config) {
  if constexpr (requires { config.storage.bits; }) {
    return " in " + StorageText::text(config.storage);
  } else {
    return "";
  }
}

/// What a head with policy `P` keeps. This one serves policies of the user's.
template <class P>
struct PolicyText {
  [[nodiscard]] static std::string text(const typename P::Config&) {
    return name_or<P>("a policy without a name");
  }
};

template <class Storage>
struct PolicyText<FullCache<Storage>> {
  [[nodiscard]] static std::string text(const typename FullCache<Storage>::Config& config) {
    return "every row" + precision_text(config);
  }
};

template <class Storage>
struct PolicyText<SinkRecentCache<Storage>> {
  [[nodiscard]] static std::string text(const typename SinkRecentCache<Storage>::Config& config) {
    std::string text = config.sinks == 0
                           ? fmt::format("the latest {} rows", with_commas(config.recent))
                           : fmt::format("the first {} rows and the latest {}",
                                         with_commas(config.sinks), with_commas(config.recent));
    text += precision_text(config);
    if (config.rotary_in_cache) text += ", at positions in the cache";
    if (config.mask == Mask::chunk) text += ", masked by chunk";
    return text;
  }
};

template <class Storage, class Scorer>
struct PolicyText<HeadBudgetCache<Storage, Scorer>> {
  using Config = typename HeadBudgetCache<Storage, Scorer>::Config;
  [[nodiscard]] static std::string text(const Config& config) {
    std::string text = fmt::format("{} rows behind a compression", with_commas(config.budget));
    const std::size_t kept = Scorer::kept_rows(config.scorer);
    if (kept > 0) text += fmt::format(", and the latest {}", with_commas(kept));
    text += precision_text(config);
    if constexpr (!std::same_as<Scorer, SnapKvScorer>) {
      text += ", ranked by " + name_or<Scorer>("a scorer without a name");
    }
    if (config.share_in_layer) text += ", shared by the heads of the layer";
    if (config.compress_from > 0) {
      text += fmt::format(", all of a text of fewer than {}", with_commas(config.compress_from));
    }
    if (config.compress_every > 0) {
      text += fmt::format(", compressed every {}", with_commas(config.compress_every));
    }
    return text;
  }
};

template <class Storage, class Summary>
struct PolicyText<ChunkRetrievalCache<Storage, Summary>> {
  using Config = typename ChunkRetrievalCache<Storage, Summary>::Config;
  [[nodiscard]] static std::string text(const Config& config) {
    std::string text =
        fmt::format("every row{}, of which {} are read in chunks of {}", precision_text(config),
                    with_commas(config.budget), config.chunk);
    text += " by " + name_or<Summary>("nameless") + " key";
    if (config.refresh_every > 0) {
      text += fmt::format(", chosen anew every {}", with_commas(config.refresh_every));
    }
    return text;
  }
};

struct ConfigText {
  template <PolicyConfig C>
  [[nodiscard]] static std::string text(const C& config) {
    return PolicyText<typename C::policy_type>::text(config);
  }
};

}  // namespace detail

/// What a head of a plan keeps, whichever policy it has: `describe(plan.at(layer, head))`. By the
/// formatter of its settings.
template <PolicyConfig... Configs>
[[nodiscard]] std::string describe(const std::variant<Configs...>& config) {
  return std::visit([](const auto& own) { return fmt::format("{}", own); }, config);
}

}  // namespace kvpolicy

/// @cond
template <kvpolicy::PolicyConfig C>
struct fmt::formatter<C, char> : kvpolicy::detail::TextFormatter<kvpolicy::detail::ConfigText> {};
/// @endcond
