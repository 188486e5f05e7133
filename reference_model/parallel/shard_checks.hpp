// SPDX-License-Identifier: Apache-2.0
//
// What a cache over ranks refuses of a plan and its shards, on every rank alike.
#pragma once

#include <cstddef>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/plan/shards.hpp>

namespace kvpolicy::reference {
namespace detail {

template <Element E>
void check_part(const HeadPlan<E>& plan, std::size_t layer, const HeadPart& part, std::size_t ranks) {
  const HeadSettings<E>& settings = plan.at(layer, part.head);
  require(!settings.is_adaptive_in_layer() || ranks == 1, "RankCache: head ", part.head, " of layer ", layer,
          " shares its budget with other heads, of which ranks know only their own; give each head its own "
          "budget (compete=head)");
  if (part.rows.is_whole()) return;
  const std::size_t head_dim = plan.shape().layer(layer).head_dim;
  require(settings.has_rule() && can_cut(settings.rule(head_dim), false), "RankCache: head ", part.head,
          " of layer ", layer,
          " is cut by rows, and does not keep every row and read it; balance it with whole heads, or "
          "without cut_budgets");
}

}  // namespace detail

/// @throws ConfigError for shards of another shape or number of ranks, a cut head that does not keep every row and read
/// it, heads on several ranks that share budgets, or a layer that reads the cache of another
template <Element E>
void check_shards(const HeadPlan<E>& plan, const Shards& shards, std::size_t ranks) {
  const ModelShape& shape = plan.shape();
  require(shards.ranks() == ranks, "RankCache: shards for ", shards.ranks(), " ranks, there are ", ranks);
  require(shards.layers() == shape.layers, "RankCache: shards of ", shards.layers(), " layers, the plan has ",
          shape.layers);
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    const LayerShape own = shape.layer(layer);
    require(!own.reads, "RankCache: layer ", layer,
            " reads the cache of another layer, which ranks do not do yet");
    for (std::size_t rank = 0; rank < ranks; ++rank) {
      for (const HeadPart& part : shards.parts(layer, rank)) {
        require(part.head < own.kv_heads, "RankCache: the shards have head ", part.head, " of layer ", layer,
                ", the plan has ", own.kv_heads);
        detail::check_part(plan, layer, part, ranks);
      }
    }
  }
}

}  // namespace kvpolicy::reference
