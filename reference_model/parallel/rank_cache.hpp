// SPDX-License-Identifier: Apache-2.0
//
// One rank's part of a cache (plan/shards.hpp): a KvCache with the heads that it holds whole, and the rows that are its
// own of each head that is cut. Attention over a cut head needs one message a layer, of log-sum-exps alone: a rank
// multiplies its outputs by its share of all weights, and the sum over ranks that follows the output projection, which is
// linear, adds up the parts.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/plan/shards.hpp>
#include <reference_model/parallel/communicator.hpp>
#include <reference_model/run.hpp>

namespace kvpolicy::reference {

/// The parts that a rank holds of a layer, in the order in which its tensors have their heads: whole ones, then cut ones.
[[nodiscard]] inline std::vector<HeadPart> parts_in_order(const Shards& shards, std::size_t layer,
                                                          std::size_t rank) {
  const auto parts = shards.parts(layer, rank);
  std::vector<HeadPart> order{parts.begin(), parts.end()};
  std::ranges::stable_partition(order, [](const HeadPart& part) { return part.rows.is_whole(); });
  return order;
}

/// Rows of element type E. Not synchronised; `ranks` must outlive it.
template <Element E, class Engine = ScalarEngine>
class RankCache {
 public:
  /// `plan` and `shards` are those of the whole model, the same on every rank.
  /// @throws ConfigError for shards of another shape, or a cut head that does not keep and read every row
  RankCache(const HeadPlan<E>& plan, const Shards& shards, Communicator& ranks,
            const CacheOptions& options = {}, Engine engine = {})
      : ranks_{&ranks}, shape_{plan.shape()}, options_{options}, engine_{std::move(engine)} {
    require(shards.ranks() == ranks.size(), "RankCache: shards for ", shards.ranks(), " ranks, there are ",
            ranks.size());
    require(shards.layers() == shape_.layers, "RankCache: shards of ", shards.layers(),
            " layers, the plan has ", shape_.layers);
    ModelShape whole = shape_;
    std::vector<std::vector<std::size_t>> heads(shape_.layers);
    bool any = false;
    for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
      const LayerShape own = shape_.layer(layer);
      Layer& made = layers_.emplace_back();
      made.merges = shards.merges(layer);
      for (const HeadPart& part : parts_in_order(shards, layer, ranks.rank())) {
        require(part.head < own.kv_heads, "RankCache: the shards have head ", part.head, " of layer ", layer,
                ", the plan has ", own.kv_heads);
        if (part.rows.is_whole()) {
          heads[layer].push_back(part.head);
        } else {
          made.cut.emplace_back(part, one_head(own, plan.at(layer, part.head), layer));
        }
      }
      made.whole = heads[layer].size();
      LayerShape& changed = whole.change(layer);
      changed.q_heads = made.whole * own.queries_per_kv();
      changed.kv_heads = made.whole;
      any = any || made.whole > 0;
    }
    if (!any) return;
    HeadPlan<E> own{whole};
    for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
      for (std::size_t i = 0; i < heads[layer].size(); ++i)
        own.set(layer, i, plan.at(layer, heads[layer][i]));
    }
    whole_.emplace(own, options_, engine_);
  }

  /// Tokens of the text that layer 0 has seen.
  [[nodiscard]] std::size_t tokens() const { return layers_.front().tokens; }
  /// Bytes of this rank's rows.
  [[nodiscard]] std::size_t bytes() const {
    std::size_t total = whole_ ? whole_->bytes() : 0;
    for (const Layer& layer : layers_) {
      for (const CutHead& cut : layer.cut) total += cut.cache.bytes();
    }
    return total;
  }

  /// One layer's attention, on every rank at once: q, k and v have the heads of `parts_in_order`, of tokens that follow
  /// those that are there. What `out` has of a cut head is to be added up over ranks.
  /// @throws as KvCache::step; CommunicationError
  void step(std::size_t layer, TensorView<const float> q, TensorView<const float> k,
            TensorView<const float> v, TensorView<float> out) {
    Layer& own = layers_[layer];
    const std::size_t group = shape_.layer(layer).queries_per_kv();
    if (own.whole > 0) {
      const std::size_t queries = own.whole * group;
      const std::vector<float> keys = columns(k, own.whole);
      const std::vector<float> values = columns(v, own.whole);
      TensorView<const float> some = q;
      some.heads = queries;
      TensorView<float> some_out = out;
      some_out.heads = queries;
      step_layer(*whole_, layer, some, TensorView<const float>{keys.data(), k.tokens, own.whole, k.head_dim},
                 TensorView<const float>{values.data(), v.tokens, own.whole, v.head_dim}, some_out);
    }
    std::vector<std::vector<float>> log_sum_exps;  // of each cut head that is here: [tokens, group]
    for (std::size_t i = 0; i < own.cut.size(); ++i) {
      const std::size_t head = own.whole + i;
      log_sum_exps.push_back(attend_and_append(own.cut[i], own.tokens, heads_of(q, head * group, group),
                                               heads_of(k, head, 1), heads_of(v, head, 1),
                                               heads_of(out, head * group, group)));
    }
    if (!own.merges.empty()) scale_parts(own, group, q.tokens, log_sum_exps, out);
    own.tokens += q.tokens;
  }

  /// Takes back the rows from text position `tokens` on. @throws RollbackError as KvCache::truncate
  void truncate(std::size_t tokens) {
    if (whole_) whole_->truncate(tokens);
    for (Layer& layer : layers_) {
      for (CutHead& cut : layer.cut) {
        const std::size_t rows = cut.part.rows.rows_of(tokens);
        cut.cache.truncate(rows);
        cut.positions.resize(rows);
      }
      layer.tokens = tokens;
    }
  }
  /// As KvCache::commit.
  void commit() {
    if (whole_) whole_->commit();
    for (Layer& layer : layers_) {
      for (CutHead& cut : layer.cut) cut.cache.commit();
    }
  }

 private:
  using Cache = KvCache<E, Engine>;

  struct CutHead {
    CutHead(const HeadPart& part_, Cache cache_) : part{part_}, cache{std::move(cache_)} {}
    HeadPart part;
    Cache cache;                          // of this head's own rows
    std::vector<std::int64_t> positions;  // of each of them in the text
  };
  struct Layer {
    std::size_t whole = 0;
    std::vector<CutHead> cut;
    std::vector<HeadMerge> merges;  // of all ranks
    std::size_t tokens = 0;
  };

  [[nodiscard]] Cache one_head(const LayerShape& layer, const HeadSettings<E>& settings,
                               std::size_t number) const {
    const HeadRule rule = settings.rule(layer.head_dim);
    require(rule.keeps_every_row() && rule.chunk == 0, "RankCache: a head of layer ", number,
            " is cut by rows, and does not keep and read every row; balance it with whole heads, or without "
            "cut_budgets");
    LayerShape one = layer;
    one.q_heads = layer.queries_per_kv();
    one.kv_heads = 1;
    ModelShape shape{.layers = 1};
    shape.per_layer.push_back(one);
    return Cache{HeadPlan<E>{shape, settings}, options_, engine_};
  }

  template <class T>
  [[nodiscard]] static TensorView<T> heads_of(TensorView<T> all, std::size_t first, std::size_t count) {
    all.data += first * all.head_stride;
    all.heads = count;
    return all;
  }
  // The first `heads` heads of a tensor, contiguous.
  [[nodiscard]] static std::vector<float> columns(const TensorView<const float>& all, std::size_t heads) {
    std::vector<float> copied;
    for (std::size_t t = 0; t < all.tokens; ++t) {
      for (std::size_t head = 0; head < heads; ++head) {
        const float* row = all.row(t, head);
        copied.insert(copied.end(), row, row + all.head_dim);
      }
    }
    return copied;
  }

  // Attends to the rows of the head that are here, with those of the call's that stay here, which then join them. Returns
  // the log-sum-exps [tokens, group].
  std::vector<float> attend_and_append(CutHead& cut, std::size_t first, const TensorView<const float>& q,
                                       const TensorView<const float>& k, const TensorView<const float>& v,
                                       const TensorView<float>& out) {
    std::vector<E> keys, values;
    std::vector<std::int64_t> positions;
    for (std::size_t t = 0; t < q.tokens; ++t) {
      if (!cut.part.rows.has(first + t)) continue;
      std::transform(k.row(t, 0), k.row(t, 0) + k.head_dim, std::back_inserter(keys),
                     [](float x) { return E{x}; });
      std::transform(v.row(t, 0), v.row(t, 0) + v.head_dim, std::back_inserter(values),
                     [](float x) { return E{x}; });
      positions.push_back(static_cast<std::int64_t>(first + t));
    }
    const std::size_t rows = positions.size();
    std::vector<Segment> segments;
    std::size_t shown = 0;
    if (!cut.positions.empty()) {
      for (const Segment& segment : cut.cache.segments(0, 0, Read::all)) {
        segments.push_back(segment);
        segments.back().positions = cut.positions.data() + shown;
        shown += segment.rows;
      }
    }
    if (rows > 0) {
      const auto plane = [&](const std::vector<E>& numbers, std::size_t channels) {
        return Plane{.format = {.encoding = encoding_of<E>},
                     .base = reinterpret_cast<const std::byte*>(numbers.data()),
                     .row_stride = channels * sizeof(E)};
      };
      Segment own;
      own.keys = plane(keys, k.head_dim);
      own.values = plane(values, v.head_dim);
      own.rows = rows;
      own.positions = positions.data();
      segments.push_back(own);
    }
    std::vector<float> log_sum_exp(q.tokens * q.heads);
    const std::span<const Segment> all{segments};
    LayerAttention work;
    work.queries = ConstTensor{q};
    work.out = MutableTensor{out};
    work.first_position = static_cast<std::int64_t>(first);
    work.heads = {&all, 1};
    work.options.log_sum_exp = log_sum_exp;
    engine_.attend(work);
    for (std::size_t row = 0; row < rows; ++row) {
      cut.cache.append(0, TensorView<const E>{keys.data() + row * k.head_dim, 1, 1, k.head_dim},
                       TensorView<const E>{values.data() + row * v.head_dim, 1, 1, v.head_dim});
      cut.positions.push_back(positions[row]);
    }
    return log_sum_exp;
  }

  // Multiplies this rank's outputs of each cut head by its share of the weights of all ranks.
  void scale_parts(const Layer& own, std::size_t group, std::size_t tokens,
                   const std::vector<std::vector<float>>& log_sum_exps, const TensorView<float>& out) {
    constexpr float none = -std::numeric_limits<float>::infinity();
    const std::size_t queries = tokens * group;
    std::vector<float> mine(own.merges.size() * queries, none);
    for (std::size_t i = 0; i < own.cut.size(); ++i) {
      std::ranges::copy(log_sum_exps[i], mine.begin() + static_cast<std::ptrdiff_t>(
                                                            place(own, own.cut[i].part.head) * queries));
    }
    std::vector<float> all(mine.size() * ranks_->size());
    ranks_->gather(mine, all);
    for (std::size_t i = 0; i < own.cut.size(); ++i) {
      const std::size_t merge = place(own, own.cut[i].part.head);
      for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t g = 0; g < group; ++g) {
          const std::size_t query = merge * queries + t * group + g;
          float highest = none;
          for (std::size_t rank = 0; rank < ranks_->size(); ++rank) {
            highest = std::max(highest, all[rank * mine.size() + query]);
          }
          float total = 0;
          for (std::size_t rank = 0; rank < ranks_->size(); ++rank) {
            total += std::exp(all[rank * mine.size() + query] - highest);
          }
          const float share = mine[query] == none ? 0.0F : std::exp(mine[query] - highest) / total;
          float* row = out.row(t, (own.whole + i) * group + g);
          for (std::size_t channel = 0; channel < out.head_dim; ++channel) row[channel] *= share;
        }
      }
    }
  }
  [[nodiscard]] static std::size_t place(const Layer& own, std::size_t head) {
    return static_cast<std::size_t>(std::ranges::find(own.merges, head, &HeadMerge::head) -
                                    own.merges.begin());
  }

  Communicator* ranks_;
  ModelShape shape_;
  CacheOptions options_;
  Engine engine_;
  std::optional<Cache> whole_;  // where any head is whole
  std::vector<Layer> layers_;
};

}  // namespace kvpolicy::reference
