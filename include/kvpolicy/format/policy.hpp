// SPDX-License-Identifier: Apache-2.0
//
// Prints what a head with some settings keeps: "every row in 4 bits but for the latest 128", "the first 16
// rows and the latest 128". A policy without a rule prints as its name.
#pragma once

#include <string>
#include <string_view>

#include <fmt/format.h>

#include <kvpolicy/format/bytes.hpp>
#include <kvpolicy/format/storage.hpp>
#include <kvpolicy/policy/head_settings.hpp>

namespace kvpolicy {

namespace detail {

struct PolicyText {
  /// The rule as text. A group of 0 means that a whole row shares a scale.
  [[nodiscard]] static std::string text(const HeadRule& rule) {
    const std::string precision = precision_text(rule);
    if (rule.compresses) return budget_text(rule, precision);
    if (rule.chunk > 0) return retrieval_text(rule, precision);
    return rule.recent > 0 ? window_text(rule, precision) : "every row" + precision;
  }

  template <Element E>
  [[nodiscard]] static std::string text(const HeadSettings<E>& settings) {
    return settings.has_rule() ? text(settings.rule(0)) : std::string{settings.names().policy};
  }

  template <PolicyConfig C>
  [[nodiscard]] static std::string text(const C& config) {
    using Traits = policy_traits<typename C::policy_type>;
    if constexpr (Traits::has_rule)
      return text(C::policy_type::rule(config, 0));
    else
      return std::string{Traits::names().policy};
  }

 private:
  // " in 4 bits …" for packed rows; nothing for exact rows.
  [[nodiscard]] static std::string precision_text(const HeadRule& rule) {
    return rule.is_quantized() ? " in " + StorageText::text(rule) : std::string{};
  }

  [[nodiscard]] static std::string window_text(const HeadRule& rule, const std::string& precision) {
    std::string text = rule.sinks == 0 ? fmt::format("the latest {} rows", with_commas(rule.recent))
                                       : fmt::format("the first {} rows and the latest {}",
                                                     with_commas(rule.sinks), with_commas(rule.recent));
    text += precision;
    if (rule.rotary_in_cache) text += ", at positions in the cache";
    if (rule.prefill_chunk_mask) text += ", masked by chunk";
    return text;
  }

  [[nodiscard]] static std::string budget_text(const HeadRule& rule, const std::string& precision) {
    std::string text = fmt::format("{} rows after a compression", with_commas(rule.budget));
    if (rule.kept_rows > 0) text += fmt::format(", and the latest {}", with_commas(rule.kept_rows));
    text += precision;
    if (rule.scorer != PolicyNames::usual_scorer) {
      text += ", ranked by ";
      text += rule.scorer.empty() ? "a scorer without a name" : rule.scorer;
    }
    if (rule.votes == Votes::largest) text += " by their largest vote";
    if (rule.prior_share > 0.0) {
      text += fmt::format(", at least {} % of the mean", 100.0 * rule.prior_share);
    }
    if (rule.weighs_values) {
      text += rule.value_norm == ValueNorm::value_l2 ? ", times the length of the value"
                                                     : ", times what the value adds to the output";
    }
    if (rule.unweighed_share > 0.0) {
      text += fmt::format(", {} % of them by attention alone", 100.0 * rule.unweighed_share);
    }
    if (rule.adaptive_in_model) {
      text += ", shared by all heads of the model";
    } else if (rule.adaptive_in_layer) {
      text += ", shared by the heads of the layer";
    }
    if (rule.compress_from > 0) {
      text += fmt::format(", all of a text of fewer than {}", with_commas(rule.compress_from));
    }
    if (rule.compress_every > 0) {
      text += fmt::format(", compressed every {}", with_commas(rule.compress_every));
    }
    return text;
  }

  [[nodiscard]] static std::string retrieval_text(const HeadRule& rule, const std::string& precision) {
    std::string text = fmt::format("every row{}, of which {} are read in chunks of {}", precision,
                                   with_commas(rule.chosen_rows), rule.chunk);
    text += " by ";
    text += rule.summary.empty() ? "nameless" : rule.summary;
    text += " key";
    if (rule.refresh_every > 0) {
      text += fmt::format(", chosen again every {}", with_commas(rule.refresh_every));
    }
    return text;
  }
};

}  // namespace detail

/// What a head of a plan keeps, whichever policy it has: `describe(plan.at(layer, head))`. For a policy
/// without a rule it is its name.
template <Element E>
[[nodiscard]] std::string describe(const HeadSettings<E>& settings) {
  return detail::PolicyText::text(settings);
}

}  // namespace kvpolicy

/// @cond
template <kvpolicy::PolicyConfig C>
struct fmt::formatter<C, char> : kvpolicy::detail::TextFormatter<kvpolicy::detail::PolicyText> {};
template <kvpolicy::Element E>
struct fmt::formatter<kvpolicy::HeadSettings<E>, char>
    : kvpolicy::detail::TextFormatter<kvpolicy::detail::PolicyText> {};
/// @endcond
