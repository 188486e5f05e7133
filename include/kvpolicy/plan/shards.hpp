// SPDX-License-Identifier: Apache-2.0
//
// Divides the KV heads of a model among ranks (processes, each with a device). Tensor parallelism gives every rank the
// same number of heads; under a plan, heads cost different amounts, all ranks wait for the slowest one in each layer,
// and what a plan saves is lost. So heads are divided by cost. A head that is dearer than a fair share is cut: several
// ranks hold some of its rows each, and their results are merged by log-sum-exp (`merge_outputs`). A head that keeps
// every row and reads all of them needs nothing else. Where rows are dropped by their scores, ranks have to exchange
// these when they compress (`cut_budgets`); heads with a window and heads that choose chunks stay whole.
//
// Row r of a cut head is in slot r * 633 mod 1024, and a rank holds a range of slots. 633 is the whole number next to
// 1024 divided by the golden ratio, so any stretch of text, long or short, is spread evenly over the slots: ranks stay
// balanced while the text grows, and no row ever moves. (Decode context parallelism in vLLM deals rows out in turn for
// the same reason.)
//
// The transport is the engine's: this says who holds what, and which results belong together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/reorder.hpp>
#include <kvpolicy/plan/shard_layer.hpp>
#include <kvpolicy/plan/step_costs.hpp>

namespace kvpolicy {

/// A cut head, and the ranks that hold parts of it. The first one merges: the others send it, for each query and query
/// head, an output and its log-sum-exp.
struct HeadMerge {
  std::size_t head = 0;
  std::vector<std::size_t> ranks = {};

  friend bool operator==(const HeadMerge&, const HeadMerge&) = default;
};

/// Who holds which heads. Made by `balance` or `even_shards`.
class Shards {
 public:
  /// `layers[layer][rank]` are the parts that a rank holds, by ascending head.
  /// @throws ConfigError if a layer has not a list for each rank, or parts that are empty or not in order, or if the
  /// slots of a head that it has are not each in one part
  Shards(std::vector<std::vector<std::vector<HeadPart>>> layers, std::size_t ranks)
      : layers_{std::move(layers)}, ranks_{ranks} {
    require(ranks >= 1, "Shards: there are 0 ranks, must be at least 1");
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) check_layer(layer);
  }

  [[nodiscard]] std::size_t layers() const { return layers_.size(); }
  [[nodiscard]] std::size_t ranks() const { return ranks_; }
  /// The parts that a rank holds of a layer, by ascending head; none in a layer without a cache.
  /// @throws ConfigError if there is no such layer or rank
  [[nodiscard]] std::span<const HeadPart> parts(std::size_t layer, std::size_t rank) const {
    require(layer < layers_.size(), "Shards: there is no layer ", layer, ", there are ", layers_.size());
    require(rank < ranks_, "Shards: there is no rank ", rank, ", there are ", ranks_);
    return layers_[layer][rank];
  }

  /// What a rank's parts of a layer cost, by the cost of each part (`HeadPart::cost`).
  [[nodiscard]] double cost(std::size_t layer, std::size_t rank) const {
    double sum = 0;
    for (const HeadPart& part : parts(layer, rank)) sum += part.cost;
    return sum;
  }
  /// What the slowest rank's parts of a layer cost.
  [[nodiscard]] double slowest(std::size_t layer) const {
    double most = 0;
    for (std::size_t rank = 0; rank < ranks_; ++rank) most = std::max(most, cost(layer, rank));
    return most;
  }
  /// What the parts of a layer cost, mean over ranks.
  [[nodiscard]] double mean(std::size_t layer) const {
    double sum = 0;
    for (std::size_t rank = 0; rank < ranks_; ++rank) sum += cost(layer, rank);
    return sum / static_cast<double>(ranks_);
  }
  /// A step takes as long as the slowest rank of each layer: that, summed over layers, as a multiple of what ranks cost
  /// on average. 1 is perfect; 1 for a plan of no cost.
  [[nodiscard]] double imbalance() const {
    double most = 0;
    double all = 0;
    for (std::size_t layer = 0; layer < layers(); ++layer) {
      most += slowest(layer);
      all += mean(layer);
    }
    return all > 0 ? most / all : 1.0;
  }

  /// The heads of a layer that several ranks hold parts of.
  [[nodiscard]] std::vector<HeadMerge> merges(std::size_t layer) const {
    std::vector<HeadMerge> found;
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      for (const HeadPart& part : parts(layer, rank)) {
        if (part.rows.is_whole()) continue;
        const auto known = std::ranges::find(found, part.head, &HeadMerge::head);
        if (known == found.end()) {
          found.push_back({part.head, {rank}});
        } else {
          known->ranks.push_back(rank);
        }
      }
    }
    std::ranges::sort(found, {}, &HeadMerge::head);
    return found;
  }

  /// The KV heads of a layer in the order of the ranks that hold them, a cut head where its first part is: in this
  /// order (plan/reorder.hpp) the weights of whole heads lie rank by rank. Ranks with a later part of a head need a
  /// copy of its weights for queries, keys and values.
  [[nodiscard]] HeadOrder order(std::size_t layer) const {
    HeadOrder heads;
    for (std::size_t rank = 0; rank < ranks_; ++rank) {
      for (const HeadPart& part : parts(layer, rank)) {
        if (std::ranges::find(heads, part.head) == heads.end()) heads.push_back(part.head);
      }
    }
    return heads;
  }

  friend bool operator==(const Shards&, const Shards&) = default;

 private:
  void check_layer(std::size_t layer) const {
    require(layers_[layer].size() == ranks_, "Shards: layer ", layer, " has parts of ", layers_[layer].size(),
            " ranks, must have those of ", ranks_);
    std::vector<HeadPart> all;
    for (const std::vector<HeadPart>& parts : layers_[layer]) {
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const RowShare rows = parts[i].rows;
        require(rows.begin < rows.end && rows.end <= row_slots, "Shards: a part of head ", parts[i].head,
                " of layer ", layer, " has the slots [", rows.begin, ", ", rows.end,
                "), must have some of [0, ", row_slots, ")");
        if (i == 0) continue;
        require(parts[i - 1].head < parts[i].head, "Shards: in layer ", layer, " head ", parts[i].head,
                " follows head ", parts[i - 1].head, " on a rank; heads must ascend");
      }
      all.insert(all.end(), parts.begin(), parts.end());
    }
    std::ranges::sort(all, {}, [](const HeadPart& part) { return std::pair{part.head, part.rows.begin}; });
    for (std::size_t i = 0; i < all.size(); ++i) {
      const bool begins = i == 0 || all[i].head != all[i - 1].head;
      const bool ends = i + 1 == all.size() || all[i + 1].head != all[i].head;
      require(
          all[i].rows.begin == (begins ? 0 : all[i - 1].rows.end) && (!ends || all[i].rows.end == row_slots),
          "Shards: slots of head ", all[i].head, " of layer ", layer, " are in no part, or in two");
    }
  }

  std::vector<std::vector<std::vector<HeadPart>>> layers_;
  std::size_t ranks_;
};

/// What `balance` must keep to.
struct BalanceConfig {
  std::size_t ranks = 1;
  bool equal_heads = false;    ///< every rank holds the same number of heads, whole ones
  bool cut_rows = true;        ///< heads may be cut by rows
  bool cut_budgets = false;    ///< those with a budget as well: ranks exchange scores when they compress
  std::size_t most_parts = 0;  ///< heads and parts of heads that a rank holds of a layer; 0: any number
  double most_bytes = 0;       ///< that a rank may hold, by `balance`'s `bytes`; 0: any number
  /// What each part of a cut head costs besides its rows, in the unit of the costs: the messages that merge it.
  double merge_cost = 0;
  /// A layer is cut only if that saves more than this share of what its slowest rank costs.
  double least_gain = 0.01;

  void validate() const {
    require(ranks >= 1 && ranks <= 1024, "BalanceConfig: ranks is ", ranks, ", must be 1 to 1024");
    require(merge_cost >= 0 && merge_cost <= 1e100, "BalanceConfig: merge_cost is ", merge_cost,
            ", must be from 0 to 1e100");
    require(most_bytes >= 0, "BalanceConfig: most_bytes is ", most_bytes, ", must be 0 or positive");
    require(least_gain >= 0 && least_gain < 1, "BalanceConfig: least_gain is ", least_gain,
            ", must be at least 0 and below 1");
  }
};

namespace detail {

inline void check_costs(const ModelShape& shape, const HeadCosts& costs, const char* what) {
  require(costs.size() == shape.layers, "balance: ", what, " of ", costs.size(), " layers, the plan has ",
          shape.layers);
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    require(costs[layer].size() == shape.layer(layer).kv_heads, "balance: ", what, " of ",
            costs[layer].size(), " heads in layer ", layer, ", the plan has ", shape.layer(layer).kv_heads);
    for (std::size_t head = 0; head < costs[layer].size(); ++head) {
      // Sums of such numbers are finite.
      require(costs[layer][head] >= 0 && costs[layer][head] <= 1e100, "balance: head ", head, " of layer ",
              layer, " has ", what, " of ", costs[layer][head], ", must be from 0 to 1e100");
    }
  }
}

// Gives each layer's sets of parts to ranks so that these hold nearly the same number of bytes: the largest set to the
// rank that holds least so far. Which rank has which set changes no cost. Returns the bytes of each rank.
inline std::vector<double> spread_bytes(std::vector<std::vector<std::vector<HeadPart>>>& layers,
                                        const HeadCosts& bytes, std::size_t ranks) {
  std::vector<double> held(ranks, 0.0);
  std::vector<std::size_t> by_held(ranks);
  for (std::size_t layer = 0; layer < layers.size(); ++layer) {
    std::vector<std::pair<double, std::size_t>> sets;  // bytes, then which
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      double sum = 0;
      for (const HeadPart& part : layers[layer][rank]) sum += bytes[layer][part.head] * part.rows.share();
      sets.push_back({-sum, rank});
    }
    std::ranges::sort(sets);
    std::iota(by_held.begin(), by_held.end(), std::size_t{0});
    std::ranges::stable_sort(by_held, {}, [&](std::size_t rank) { return held[rank]; });
    std::vector<std::vector<HeadPart>> moved(ranks);
    for (std::size_t i = 0; i < ranks; ++i) {
      held[by_held[i]] -= sets[i].first;
      moved[by_held[i]] = std::move(layers[layer][sets[i].second]);
    }
    layers[layer] = std::move(moved);
  }
  return held;
}

}  // namespace detail

/// Whether ranks may hold parts of such a head's rows. Windows are cheap, and stay whole.
[[nodiscard]] inline bool can_cut(const HeadRule& rule, bool cut_budgets) {
  return rule.chunk == 0 && rule.recent == 0 && (!rule.compresses || cut_budgets);
}

/// Divides a plan's heads among ranks, layer by layer, so that the slowest rank of each costs least. Whole heads are
/// divided by a search that is exact for few heads; if cutting heads by rows saves more than `least_gain`, the layer's
/// ranks are filled to the lowest level that all heads fit under. `costs` say what a head costs a step, `bytes` what it
/// holds (`bytes_read` and `bytes_held`, or a table that was measured).
/// @throws ConfigError for costs that do not fit the plan, constraints that no division meets, or heads that share
/// their budgets (`adaptive_in_layer`), which one rank cannot know; CapacityError if a rank would hold more than
/// `most_bytes`; std::bad_alloc
template <class... T>
[[nodiscard]] Shards balance(const HeadPlan<T...>& plan, const HeadCosts& costs, const HeadCosts& bytes,
                             const BalanceConfig& config) {
  const ModelShape& shape = plan.shape();
  config.validate();
  detail::check_costs(shape, costs, "costs");
  detail::check_costs(shape, bytes, "bytes");
  std::vector<std::vector<std::vector<HeadPart>>> layers(shape.layers);
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const LayerShape own = shape.layer(layer);
    std::vector<bool> cuttable;
    for (std::size_t head = 0; head < own.kv_heads; ++head) {
      const HeadRule rule = plan.at(layer, head).rule(own.head_dim);
      require(
          !rule.adaptive_in_layer || config.ranks == 1, "balance: head ", head, " of layer ", layer,
          " shares its budget with other heads, of which ranks know only their own; give each head its own "
          "budget (compete=head)");
      cuttable.push_back(can_cut(rule, config.cut_budgets));
    }
    detail::LayerLimits limits{.ranks = config.ranks, .most_parts = config.most_parts};
    if (config.equal_heads) {
      require(own.kv_heads % config.ranks == 0, "balance: ", own.kv_heads, " KV heads of layer ", layer,
              " on ", config.ranks, " ranks are not equally many for each; leave out equal_heads");
      limits.most_parts = own.kv_heads / config.ranks;
      require(config.most_parts == 0 || limits.most_parts <= config.most_parts, "balance: each rank holds ",
              limits.most_parts, " heads of layer ", layer, ", most_parts is ", config.most_parts);
    }
    require(limits.most_parts == 0 || (own.kv_heads + config.ranks - 1) / config.ranks <= limits.most_parts,
            "balance: layer ", layer, " has ", own.kv_heads, " KV heads, ", config.ranks,
            " ranks with at most ", limits.most_parts, " hold fewer");
    limits.merge_cost = config.merge_cost;
    layers[layer] = detail::whole_heads(costs[layer], limits);
    if (config.equal_heads || !config.cut_rows) continue;
    const double whole = detail::slowest_of(layers[layer]);
    auto cut = detail::cut_heads(costs[layer], cuttable, limits, whole);
    if (cut && detail::slowest_of(*cut) < (1 - config.least_gain) * whole) layers[layer] = std::move(*cut);
  }
  const std::vector<double> held = detail::spread_bytes(layers, bytes, config.ranks);
  const auto fullest = std::ranges::max_element(held);
  require<CapacityError>(
      config.most_bytes == 0 || *fullest <= config.most_bytes, "balance: rank ", fullest - held.begin(),
      " would hold ", std::llround(*fullest), " bytes, at most ",
      std::llround(std::min(config.most_bytes, 1e18)),
      " are allowed; take more ranks, or a plan that holds less (heads are divided by cost, "
      "bytes only spread over layers)");
  return {std::move(layers), config.ranks};
}

/// The same with the bytes that a step reads as costs, for texts of `tokens` tokens.
template <class... T>
[[nodiscard]] Shards balance(const HeadPlan<T...>& plan, std::size_t tokens, const BalanceConfig& config,
                             const CacheOptions& options = {}) {
  return balance(plan, bytes_read(plan, tokens), bytes_held(plan, tokens, options), config);
}

/// Whole heads in their order, equally many for each rank, as tensor parallelism divides them: what to compare with.
/// @throws ConfigError if the ranks do not divide the heads of each layer, or costs do not fit
template <class... T>
[[nodiscard]] Shards even_shards(const HeadPlan<T...>& plan, const HeadCosts& costs, std::size_t ranks) {
  const ModelShape& shape = plan.shape();
  BalanceConfig{.ranks = ranks}.validate();
  detail::check_costs(shape, costs, "costs");
  std::vector<std::vector<std::vector<HeadPart>>> layers(shape.layers);
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const std::size_t heads = shape.layer(layer).kv_heads;
    require(heads % ranks == 0, "even_shards: ", heads, " KV heads of layer ", layer, " on ", ranks,
            " ranks are not equally many for each");
    layers[layer].resize(ranks);
    for (std::size_t head = 0; head < heads; ++head) {
      layers[layer][head / (heads / ranks)].push_back({head, {}, costs[layer][head]});
    }
  }
  return {std::move(layers), ranks};
}

/// The shape of one rank's caches: its parts are KV heads, each with as many query heads as in the model. A layer of
/// which the rank holds nothing has no cache there.
/// @throws ConfigError if the shards are of another shape, or there is no such rank
[[nodiscard]] inline ModelShape shape_of_rank(const ModelShape& shape, const Shards& shards,
                                              std::size_t rank) {
  require(shards.layers() == shape.layers, "shape_of_rank: shards of ", shards.layers(),
          " layers, the model has ", shape.layers);
  ModelShape own = shape;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const std::size_t source = shape.cache_of(layer);
    const std::size_t group =
        shape.layer(layer).q_heads / std::max<std::size_t>(shape.layer(source).kv_heads, 1);
    const std::size_t parts = shards.parts(source, rank).size();
    LayerShape& changed = own.change(layer);
    if (shape.layer(source).kv_heads == 0) continue;  // no cache in the model
    changed.q_heads = group * parts;
    if (source == layer) changed.kv_heads = parts;
    if (parts == 0) changed.reads.reset();
  }
  return own;
}

/// The plan of one rank: its parts are KV heads, in the order of `Shards::parts`, each with the settings of its head
/// and as many query heads (`shape_of_rank`).
/// @throws ConfigError if the shards are of another shape, there is no such rank, or it holds nothing at all
template <class... T>
[[nodiscard]] auto plan_of_rank(const HeadPlan<T...>& plan, const Shards& shards, std::size_t rank) {
  using E = typename HeadPlan<T...>::element_type;
  const ModelShape& shape = plan.shape();
  HeadPlan<E> result{shape_of_rank(shape, shards, rank)};
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const auto parts = shards.parts(layer, rank);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      require(parts[i].head < shape.layer(layer).kv_heads, "plan_of_rank: the shards have head ",
              parts[i].head, " of layer ", layer, ", the plan has ", shape.layer(layer).kv_heads);
      result.set(layer, i, plan.at(layer, parts[i].head));
    }
  }
  return result;
}

}  // namespace kvpolicy
