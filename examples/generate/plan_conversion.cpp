// SPDX-License-Identifier: Apache-2.0
#include "plan_conversion.hpp"

#include <cstddef>

#include <fmt/format.h>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/format.hpp>
#include <kvpolicy/plan/require_fits.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>
#include <kvpolicy/policy/snapkv_scorer.hpp>

namespace kvpolicy::tools {

io::DuoPattern pattern_of(const HeadPlan<bfloat16>& plan) {
  const std::size_t kv_heads = same_heads(plan.shape(), "plan convert").kv_heads;
  io::DuoPattern pattern{HeadGates{plan.shape().layers, kv_heads}};
  bool met = false;
  plan.for_each_head([&](std::size_t layer, std::size_t head, const HeadSettings<bfloat16>& settings) {
    using Streaming = SinkRecentCache<DenseStorage<bfloat16>>;
    if (settings.is<FullCache<DenseStorage<bfloat16>>>()) {
      pattern.gates(layer, head) = 1.0;
    } else if (const Streaming::Config* const window = settings.get_if<Streaming>()) {
      require(!met || (pattern.sinks == window->sinks && pattern.recent == window->recent),
              "a DuoAttention pattern has one window for all heads; KV head ", head, " of layer ", layer,
              " has another than the heads before it");
      pattern.sinks = window->sinks;
      pattern.recent = window->recent;
      met = true;
    } else {
      throw ConfigError(
          message("a DuoAttention pattern has only full and sink_recent heads over dense rows; KV head ",
                  head, " of layer ", layer, " is another: ", fmt::format("{}", settings)));
    }
  });
  return pattern;
}

HeadScores scores_of(const HeadPlan<bfloat16>& plan, HeadKvConfig& config) {
  const ModelShape& shape = plan.shape();
  const LayerShape same = same_heads(shape, "plan convert");
  HeadScores scores{shape.layers, same.q_heads};
  std::size_t sum = 0;
  plan.for_each_head([&](std::size_t layer, std::size_t head, const HeadSettings<bfloat16>& settings) {
    const HeadRule rule = settings.rule(shape.layer(layer).head_dim);
    require(rule.compresses && rule.scorer == SnapKvScorer::name,
            "head scores only describe heads with a budget and SnapKV's scorer; KV head ", head, " of layer ",
            layer, " is another");
    for (std::size_t i = 0; i < same.queries_per_kv(); ++i) {
      scores(layer, head * same.queries_per_kv() + i) = static_cast<double>(rule.budget);
    }
    sum += rule.budget;
    config.observation_window = rule.observation_window;
  });
  config.capacity = sum / shape.kv_head_count() + config.observation_window;
  return scores;
}

}  // namespace kvpolicy::tools
