// SPDX-License-Identifier: Apache-2.0
//
// Predicts a step of decoding over ranks from what each rank does by itself and what messages take. In each layer all
// ranks wait for the slowest one, once for attention and once for the MLP, and then add up; if a head is cut, ranks
// gather log-sum-exps first (reference_model/parallel). Nothing overlaps.
//
// A rank reads its weights once a step, at the bandwidth of its memory, and the rows of each text. A rank with a part
// of a head has all of that head's weights for queries, keys, values and outputs, whatever its share of the rows.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/plan/step_costs.hpp>

#include "network.hpp"

namespace kvpolicy::bench {

/// A rank's device.
struct Device {
  double bandwidth = 3.35e12;  ///< bytes a second from memory: an H100 with HBM3 (SXM)
  double memory = 80e9;        ///< bytes
};

/// A Llama: its attention, and how wide everything else is.
struct ModelSize {
  std::string name;
  ModelShape shape;
  std::size_t hidden = 0;
  std::size_t intermediate = 0;
  std::size_t vocabulary = 0;
  double number_bytes = 2;  ///< of a weight, and of a number that ranks add up

  /// Bytes of the weights of `q` query heads, or of one KV head without any.
  [[nodiscard]] double query_bytes(std::size_t q) const {
    return number_bytes * static_cast<double>(2 * hidden * q * shape.head_dim);  // queries, outputs
  }
  [[nodiscard]] double kv_bytes() const {
    return number_bytes * static_cast<double>(2 * hidden * shape.head_dim);  // keys, values
  }
  [[nodiscard]] double head_bytes() const { return query_bytes(shape.queries_per_kv()) + kv_bytes(); }
  /// Gate, up and down of one layer.
  [[nodiscard]] double mlp_bytes() const {
    return number_bytes * static_cast<double>(3 * hidden * intermediate);
  }
  /// The embedding, or the output layer.
  [[nodiscard]] double table_bytes() const { return number_bytes * static_cast<double>(hidden * vocabulary); }
};

/// What a rank does of a layer's attention in a step, and what it holds for it.
struct RankWork {
  double weight_bytes = 0;
  double seconds = 0;  ///< over the rows of one text
  double bytes = 0;    ///< of the rows of one text
};

/// How attention is divided: [layer][rank], and how many heads of each layer are cut.
struct Division {
  std::vector<std::vector<RankWork>> layers;
  std::vector<std::size_t> cut_heads;

  [[nodiscard]] std::size_t ranks() const { return layers.front().size(); }
};

/// What `seconds(queries)` says of a plan's heads where `queries` query heads read each of them.
using CostsByQueries = std::function<HeadCosts(std::size_t queries)>;

/// Divided as shards say.
[[nodiscard]] inline Division division_of(const ModelSize& model, const Shards& shards,
                                          const HeadCosts& seconds, const HeadCosts& bytes) {
  Division division;
  for (std::size_t layer = 0; layer < shards.layers(); ++layer) {
    std::vector<RankWork>& ranks = division.layers.emplace_back(shards.ranks());
    for (std::size_t rank = 0; rank < shards.ranks(); ++rank) {
      for (const HeadPart& part : shards.parts(layer, rank)) {
        ranks[rank].weight_bytes += model.head_bytes();
        ranks[rank].seconds += seconds[layer][part.head] * part.rows.share();
        ranks[rank].bytes += bytes[layer][part.head] * part.rows.share();
      }
    }
    division.cut_heads.push_back(shards.merges(layer).size());
  }
  return division;
}

/// Equally many heads for every rank, in their order. Where there are more ranks than KV heads, several ranks hold the
/// same head with all its rows, and divide its query heads, as engines do.
/// @throws ConfigError if heads and ranks do not divide one another, or a head has fewer query heads than ranks
[[nodiscard]] inline Division equal_heads(const ModelSize& model, std::size_t ranks,
                                          const CostsByQueries& seconds, const HeadCosts& bytes) {
  const std::size_t heads = model.shape.kv_heads;
  const std::size_t group = model.shape.queries_per_kv();
  require(heads % ranks == 0 || ranks % heads == 0, "equal_heads: ", heads, " KV heads on ", ranks,
          " ranks, one must divide the other");
  const std::size_t copies = std::max<std::size_t>(ranks / heads, 1);
  require(group % copies == 0, "equal_heads: ", group, " query heads of a KV head on ", copies,
          " ranks are not equally many for each");
  const std::size_t own = std::max<std::size_t>(heads / ranks, 1);
  const HeadCosts costs = seconds(group / copies);
  Division division;
  for (std::size_t layer = 0; layer < model.shape.layers; ++layer) {
    std::vector<RankWork>& works = division.layers.emplace_back(ranks);
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      for (std::size_t i = 0; i < own; ++i) {
        const std::size_t head = rank / copies * own + i;
        works[rank].weight_bytes += model.query_bytes(group / copies) + model.kv_bytes();
        works[rank].seconds += costs[layer][head];
        works[rank].bytes += bytes[layer][head];
      }
    }
    division.cut_heads.push_back(0);
  }
  return division;
}

/// What a step comes to, in seconds.
struct PredictedStep {
  double weights = 0;   ///< attention's, of the slowest ranks, the MLP's and the output layer's
  double rows = 0;      ///< of the slowest ranks
  double messages = 0;  ///< sums, and where heads are cut gathered log-sum-exps

  [[nodiscard]] double total() const { return weights + rows + messages; }
};

/// Seconds in which log-sum-exps of so many cut heads of a layer are gathered.
[[nodiscard]] inline double merge_seconds(const ModelSize& model, const Network& network, std::size_t ranks,
                                          std::size_t cut_heads, std::size_t texts) {
  if (cut_heads == 0) return 0;
  const auto numbers = static_cast<double>(cut_heads * model.shape.queries_per_kv() * texts);
  return seconds_to_gather(network, ranks, sizeof(float) * numbers);
}

/// One token of each of `texts` texts.
[[nodiscard]] inline PredictedStep predict(const ModelSize& model, const Device& device,
                                           const Network& network, const Division& division,
                                           std::size_t texts) {
  const std::size_t ranks = division.ranks();
  const auto p = static_cast<double>(ranks);
  const auto count = static_cast<double>(texts);
  const double sum =
      seconds_to_sum(network, ranks, count * model.number_bytes * static_cast<double>(model.hidden));
  PredictedStep step;
  step.weights = model.table_bytes() / p / device.bandwidth;
  for (std::size_t layer = 0; layer < division.layers.size(); ++layer) {
    const auto seconds = [&](const RankWork& work) {
      return work.weight_bytes / device.bandwidth + count * work.seconds;
    };
    const RankWork slowest = std::ranges::max(division.layers[layer], {}, seconds);
    step.weights += (slowest.weight_bytes + model.mlp_bytes() / p) / device.bandwidth;
    step.rows += count * slowest.seconds;
    step.messages += 2 * sum + merge_seconds(model, network, ranks, division.cut_heads[layer], texts);
  }
  return step;
}

/// Whole texts for which the ranks' memory has room beside the weights; nothing if these do not fit by themselves.
[[nodiscard]] inline std::optional<std::size_t> texts_that_fit(const ModelSize& model, const Device& device,
                                                               const Division& division) {
  const std::size_t ranks = division.ranks();
  const auto layers = static_cast<double>(division.layers.size());
  std::optional<std::size_t> fewest;
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    double weights = (layers * model.mlp_bytes() + 2 * model.table_bytes()) / static_cast<double>(ranks);
    double rows = 0;
    for (const auto& layer : division.layers) {
      weights += layer[rank].weight_bytes;
      rows += layer[rank].bytes;
    }
    if (weights > device.memory) return std::nullopt;
    if (rows == 0) continue;  // it holds no head
    const auto texts = static_cast<std::size_t>((device.memory - weights) / rows);
    fewest = std::min(fewest.value_or(texts), texts);
  }
  return fewest;
}

/// Divided by `balance` for so many texts: whole heads, or some cut by rows where that is predicted to be faster.
/// `seconds` over rows and `bytes` of rows are those of one text.
template <class... T>
[[nodiscard]] Division balanced(const HeadPlan<T...>& plan, const ModelSize& model, const Device& device,
                                const Network& network, std::size_t ranks, std::size_t texts,
                                const HeadCosts& seconds, const HeadCosts& bytes) {
  // A part of a cut head costs a message, and the weights of its head once more.
  const double weights = model.head_bytes() / device.bandwidth;
  HeadCosts costs = seconds;
  for (auto& layer : costs) {
    for (double& cost : layer) cost = cost * static_cast<double>(texts) + weights;
  }
  BalanceConfig config{.ranks = ranks, .cut_rows = false};
  Division best = division_of(model, balance(plan, costs, bytes, config), seconds, bytes);
  if (ranks == 1) return best;
  config.cut_rows = true;
  config.merge_cost = merge_seconds(model, network, ranks, 1, texts) + weights;
  Division cut = division_of(model, balance(plan, costs, bytes, config), seconds, bytes);
  const auto total = [&](const Division& division) {
    return predict(model, device, network, division, texts).total();
  };
  return total(cut) < total(best) ? cut : best;
}

}  // namespace kvpolicy::bench
