// SPDX-License-Identifier: Apache-2.0
//
// Prints plans, shapes and estimates in one line:
//
//     plan               32 layers of 8 KV heads: 128 full, 128 sink_recent; grows by 65.54 kB a token
//     shape              32 layers, 32 query heads, 8 KV heads of 128
//     plan.memory(8192)  17.31 MB (rows 16.78 MB, tail 0.53 MB)
//
// The line of a plan needs no model: it says which policy each head has, and what one more token costs in a
// text that is longer than every window and budget, with pages of CacheOptions' default size.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include <fmt/format.h>

#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/format/bytes.hpp>
#include <kvpolicy/format/policy.hpp>
#include <kvpolicy/format/storage.hpp>
#include <kvpolicy/plan/cache_options.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy::detail {

/// A policy and the settings that distinguish it from others of its kind, without sizes: "full", "full (4
/// bits)", "head_budget (h2o)".
template <Element E>
[[nodiscard]] std::string kind_text(const HeadSettings<E>& settings) {
  const PolicyNames names = settings.names();
  std::string how;
  if (!names.scorer.empty() && names.scorer != PolicyNames::usual_scorer) how += names.scorer;
  if (settings.has_rule() && settings.rule(0).is_quantized()) {
    how += (how.empty() ? "" : ", ") + bits_text(settings.rule(0));
  }
  std::string text{names.policy == PolicyNames::nameless ? std::string_view{"other"} : names.policy};
  if (!how.empty()) text += fmt::format(" ({})", how);
  return text;
}

/// How the memory of a head grows in a text far longer than what any policy keeps (2^32 tokens), and
/// whether that requires compressions.
struct HeadGrowth {
  static constexpr std::size_t far = std::size_t{1} << 32;
  static constexpr std::size_t tokens = std::size_t{1} << 20;
  double bytes_a_token = 0.0;
  bool compresses = false;
  bool known = true;

  template <Element E>
  [[nodiscard]] static HeadGrowth of(const HeadSettings<E>& settings, const StorageContext& context) {
    if (!settings.predicts_memory()) return {.known = false};
    const double more = static_cast<double>(settings.bytes_compressed(context, far + tokens)) -
                        static_cast<double>(settings.bytes_compressed(context, far));
    return {more / static_cast<double>(tokens), settings.predicts_compressed()};
  }
};

struct PlanText {
  [[nodiscard]] static std::string text(const ModelShape& shape) {
    // Neighbouring layers that are alike are printed together.
    std::string text = fmt::format("{} layer{}", shape.layers, plural(shape.layers));
    if (shape.per_layer.empty()) return text + ", " + text_of(shape.layer(0));
    for (std::size_t first = 0, end = 0; first < shape.layers; first = end) {
      while (end < shape.layers && shape.layer(end) == shape.layer(first)) ++end;
      const std::string numbers =
          end == first + 1 ? fmt::format("{}", first) : fmt::format("{} to {}", first, end - 1);
      text += fmt::format("; {}: {}", numbers, text_of(shape.layer(first)));
    }
    return text;
  }

  [[nodiscard]] static std::string text(const MemoryEstimate& estimate) {
    std::string text = fmt::format("{}", Bytes{estimate.total()});
    std::string parts;
    const auto add = [&](std::size_t bytes, const char* before, const char* after) {
      if (bytes == 0) return;
      parts += fmt::format("{}{}{}{}", parts.empty() ? "" : ", ", before, Bytes{bytes}, after);
    };
    add(estimate.heads, "rows ", "");
    add(estimate.slow, "", " of them in slow memory");
    add(estimate.tail, "tail ", "");
    add(estimate.queries, "queries ", "");
    return estimate.total() == 0 ? text : text + " (" + parts + ')';
  }

  template <class... T>
  [[nodiscard]] static std::string text(const HeadPlan<T...>& plan) {
    struct Kind {
      std::string name;
      std::size_t heads;
    };
    std::vector<Kind> kinds;  // in the order of their first use in the plan
    double growth = 0.0;
    bool compresses = false;
    bool known = true;
    const ModelShape& shape = plan.shape();
    plan.for_each_head([&](std::size_t layer, std::size_t, const auto& settings) {
      const LayerShape own = shape.layer(layer);
      const StorageContext context = CacheOptions{}.context(own.head_dim, own.value_dim);
      const std::string name = kind_text(settings);
      const auto same = std::ranges::find(kinds, name, &Kind::name);
      if (same == kinds.end()) {
        kinds.push_back({name, 1});
      } else {
        ++same->heads;
      }
      const HeadGrowth head = HeadGrowth::of(settings, context);
      growth += head.bytes_a_token;
      compresses = compresses || head.compresses;
      known = known && head.known;
    });
    std::size_t least = shape.layer(0).kv_heads;
    std::size_t most = least;
    for (std::size_t l = 1; l < shape.per_layer.size(); ++l) {
      least = std::min(least, shape.per_layer[l].kv_heads);
      most = std::max(most, shape.per_layer[l].kv_heads);
    }
    std::string text = fmt::format("{} layer{} of ", shape.layers, plural(shape.layers));
    if (least != most) text += fmt::format("{} to ", least);
    text += fmt::format("{} KV head{}: ", most, plural(most));
    for (const Kind& kind : kinds) {
      text += fmt::format("{}{} {}", &kind == kinds.data() ? "" : ", ", kind.heads, kind.name);
    }
    if (!known) return text;
    text += growth < 0.5
                ? std::string{"; of bounded size"}
                : fmt::format("; grows by {} a token", Bytes{static_cast<std::uint64_t>(growth + 0.5)});
    return text + (compresses ? " once compressed" : "");
  }

 private:
  [[nodiscard]] static const char* plural(std::size_t count) { return count == 1 ? "" : "s"; }

  [[nodiscard]] static std::string text_of(const LayerShape& layer) {
    if (layer.reads) return fmt::format("the cache of layer {}", *layer.reads);
    if (layer.kv_heads == 0) return "no cache";
    std::string text =
        fmt::format("{} query head{}, {} KV head{} of {}", layer.q_heads, plural(layer.q_heads),
                    layer.kv_heads, plural(layer.kv_heads), layer.head_dim);
    if (layer.value_dim != layer.head_dim) text += fmt::format(" and {}", layer.value_dim);
    if (layer.window > 0) text += fmt::format(", a window of {}", layer.window);
    return text;
  }
};

}  // namespace kvpolicy::detail

/// @cond
template <>
struct fmt::formatter<kvpolicy::ModelShape, char>
    : kvpolicy::detail::TextFormatter<kvpolicy::detail::PlanText> {};
template <>
struct fmt::formatter<kvpolicy::MemoryEstimate, char>
    : kvpolicy::detail::TextFormatter<kvpolicy::detail::PlanText> {};
template <class... T>
struct fmt::formatter<kvpolicy::HeadPlan<T...>, char>
    : kvpolicy::detail::TextFormatter<kvpolicy::detail::PlanText> {};
/// @endcond
