// SPDX-License-Identifier: Apache-2.0
//
// One rank's part of a cache (plan/shards.hpp): a KvCache with the heads that it holds whole, and the rows that are its
// own of each head that is cut. Attention over a cut head needs one message a layer, of log-sum-exps alone: a rank
// multiplies its outputs by its share of all weights, and the sum over ranks that follows the output projection, which
// is linear, adds up the parts.
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

#include <kvpolicy/cache/call_checks.hpp>
#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/cache/saved_cache.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/attention_state.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/state/archive.hpp>
#include <reference_model/parallel/communicator.hpp>
#include <reference_model/run.hpp>

namespace kvpolicy::reference {

/// The parts that a rank holds of a layer, in the order in which its tensors have their heads: whole ones, then cut
/// ones.
[[nodiscard]] inline std::vector<HeadPart> parts_in_order(const Shards& shards, std::size_t layer,
                                                          std::size_t rank) {
  const auto parts = shards.parts(layer, rank);
  std::vector<HeadPart> order{parts.begin(), parts.end()};
  std::stable_partition(order.begin(), order.end(),
                        [](const HeadPart& part) { return part.rows.is_whole(); });
  return order;
}

/// Tells shards from others.
[[nodiscard]] inline std::uint64_t digest_of(const Shards& shards) {
  std::vector<std::uint64_t> numbers{shards.ranks(), shards.layers()};
  for (std::size_t layer = 0; layer < shards.layers(); ++layer) {
    for (std::size_t rank = 0; rank < shards.ranks(); ++rank) {
      for (const HeadPart& part : shards.parts(layer, rank)) {
        numbers.insert(numbers.end(), {layer, rank, part.head, part.rows.begin, part.rows.end});
      }
    }
  }
  return digest(numbers);
}

/// Rows of element type E. Every rank makes the same calls. Not synchronised; `ranks` must outlive it. After an error
/// other than a refusal (ShapeError, ConfigError, RollbackError) the cache is of no further use, since ranks may have
/// come differently far.
template <Element E, class Engine = ScalarEngine>
class RankCache {
 public:
  /// `plan` and `shards` are those of the whole model.
  /// @throws ConfigError, on every rank, for shards of another shape or number of ranks, a cut head that does not keep
  /// every row and read it, or a layer that reads the cache of another; if ranks have another plan,
  /// other shards or options
  RankCache(const HeadPlan<E>& plan, const Shards& shards, Communicator& ranks,
            const CacheOptions& options = {}, Engine engine = {})
      : ranks_{&ranks},
        plan_{plan},
        shards_{shards},
        shape_{plan.shape()},
        options_{options},
        engine_{std::move(engine)} {
    require_same(ranks, "plan", SavedCache::digest_of(plan));
    require_same(ranks, "shards", digest_of(shards));
    require_same(ranks, "cache options",
                 digest(options_.max_rollback, options_.max_tokens, options_.page_rows));
    require(shards.ranks() == ranks.size(), "RankCache: shards for ", shards.ranks(), " ranks, there are ",
            ranks.size());
    require(shards.layers() == shape_.layers, "RankCache: shards of ", shards.layers(),
            " layers, the plan has ", shape_.layers);
    ModelShape whole = shape_;
    std::vector<std::vector<std::size_t>> heads(shape_.layers);
    bool any = false;
    for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
      const LayerShape own = shape_.layer(layer);
      require(!own.reads, "RankCache: layer ", layer,
              " reads the cache of another layer, which ranks do not do yet");
      Layer& made = layers_.emplace_back();
      made.merges = shards.merges(layer);
      for (const HeadMerge& merge : made.merges) check_cut(plan, layer, merge.head);
      for (const HeadPart& part : parts_in_order(shards, layer, ranks.rank())) {
        require(part.head < own.kv_heads, "RankCache: the shards have head ", part.head, " of layer ", layer,
                ", the plan has ", own.kv_heads);
        if (part.rows.is_whole()) {
          heads[layer].push_back(part.head);
        } else {
          made.cut.emplace_back(part, one_head(own, plan.at(layer, part.head)));
        }
      }
      made.whole = heads[layer].size();
      made.group = own.kv_heads == 0 ? 0 : own.queries_per_kv();
      LayerShape& changed = whole.change(layer);
      changed.q_heads = made.whole * made.group;
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

  [[nodiscard]] const HeadPlan<E>& plan() const { return plan_; }
  [[nodiscard]] const Shards& shards() const { return shards_; }
  [[nodiscard]] const CacheOptions& options() const { return options_; }
  [[nodiscard]] Communicator& ranks() const { return *ranks_; }
  [[nodiscard]] Engine& engine() { return engine_; }

  /// Tokens of the text that every layer has seen; inside a forward pass some have seen more.
  [[nodiscard]] std::size_t tokens() const {
    return std::ranges::min_element(layers_, {}, &Layer::tokens)->tokens;
  }
  /// @throws RollbackError if an earlier pass failed between two layers, and was not truncated
  void require_even() const {
    for (const Layer& layer : layers_) {
      require<RollbackError>(layer.tokens == tokens(), "RankCache: a layer has seen ", layer.tokens,
                             " tokens, another only ", tokens(), ": a pass failed half-way");
    }
  }
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
  /// @throws ShapeError if a tensor has other heads, or a number does not fit E; as KvCache::step; CommunicationError
  void step(std::size_t layer, TensorView<const float> q, TensorView<const float> k,
            TensorView<const float> v, TensorView<float> out) {
    require<ShapeError>(layer < layers_.size(), "RankCache: there is no layer ", layer, ", there are ",
                        layers_.size());
    Layer& own = layers_[layer];
    const std::size_t parts = own.whole + own.cut.size();
    require<ShapeError>(
        q.heads == parts * own.group && out.heads == q.heads && k.heads == parts && v.heads == parts,
        "RankCache: layer ", layer, " has ", parts, " parts of ", own.group,
        " query heads here; the call brings ", q.heads, " query and ", k.heads, " KV heads");
    require<ShapeError>(k.tokens == q.tokens && v.tokens == q.tokens && out.tokens == q.tokens,
                        "RankCache: q, k, v and out must have as many tokens");
    if (parts > 0) {
      check_range<E>("k", ConstTensor{k});
      check_range<E>("v", ConstTensor{v});
    }
    std::vector<CutCall> calls;
    for (std::size_t i = 0; i < own.cut.size(); ++i) {
      const std::size_t head = own.whole + i;
      calls.push_back(attend(own.cut[i], own.tokens, heads_of(q, head * own.group, own.group),
                             heads_of(k, head, 1), heads_of(v, head, 1),
                             heads_of(out, head * own.group, own.group)));
    }
    if (!own.merges.empty()) scale_parts(own, q.tokens, calls, out);
    // Nothing has changed yet, and no message follows.
    if (own.whole > 0) {
      const std::vector<float> keys = columns(k, own.whole);
      const std::vector<float> values = columns(v, own.whole);
      TensorView<const float> some = q;
      some.heads = own.whole * own.group;
      TensorView<float> some_out = out;
      some_out.heads = some.heads;
      step_layer(*whole_, layer, some, TensorView<const float>{keys.data(), k.tokens, own.whole, k.head_dim},
                 TensorView<const float>{values.data(), v.tokens, own.whole, v.head_dim}, some_out);
    }
    for (std::size_t i = 0; i < own.cut.size(); ++i) append(own.cut[i], calls[i], k.head_dim, v.head_dim);
    advance(own, q.tokens);
  }

  /// Adds rows of tokens that follow those that are there, whose attention was computed elsewhere
  /// (prefill_over_ranks.hpp): k and v have the heads of `parts_in_order`. Of a head that is cut only this rank's rows
  /// are read, and of a window only those count that its policy keeps in the end. No message.
  /// @throws ShapeError if a tensor has other heads, or a policy cannot keep a row; std::bad_alloc
  void add(std::size_t layer, TensorView<const E> k, TensorView<const E> v) {
    require<ShapeError>(layer < layers_.size(), "RankCache: there is no layer ", layer, ", there are ",
                        layers_.size());
    Layer& own = layers_[layer];
    const std::size_t parts = own.whole + own.cut.size();
    require<ShapeError>(k.heads == parts && v.heads == parts && k.tokens == v.tokens, "RankCache: layer ",
                        layer, " has ", parts, " parts here; the call brings keys of ", k.heads,
                        " heads and ", k.tokens, " tokens, values of ", v.heads, " and ", v.tokens);
    if (k.tokens == 0) return;
    if (own.whole > 0) add_whole(layer, heads_of(k, 0, own.whole), heads_of(v, 0, own.whole));
    for (std::size_t i = 0; i < own.cut.size(); ++i) {
      CutHead& cut = own.cut[i];
      for (std::size_t t = 0; t < k.tokens; ++t) {
        if (!cut.part.rows.has(own.tokens + t)) continue;
        cut.cache.append(0, heads_of(k, own.whole + i, 1).slice(t, 1),
                         heads_of(v, own.whole + i, 1).slice(t, 1));
        cut.positions.push_back(static_cast<std::int64_t>(own.tokens + t));
      }
    }
    advance(own, k.tokens);
  }

  /// Takes back the rows from text position `tokens` on.
  /// @throws RollbackError, on every rank and with nothing changed, if a layer has committed that far, or has not come
  /// that far
  void truncate(std::size_t tokens) {
    for (const Layer& layer : layers_) {
      require<RollbackError>(tokens <= layer.tokens && tokens >= layer.committed,
                             "RankCache: cannot go back to ", tokens, " tokens: ", layer.committed, " of ",
                             layer.tokens, " are committed");
    }
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
      layer.committed = layer.tokens;
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
    std::size_t group = 0;  // query heads of a KV head
    std::vector<CutHead> cut;
    std::vector<HeadMerge> merges;  // of all ranks
    std::size_t tokens = 0;
    std::size_t committed = 0;  // of them, which cannot be taken back
  };
  // What a call brings to a cut head: the rows that stay here, and the log-sum-exps [tokens, group] of its queries.
  struct CutCall {
    std::vector<E> keys, values;
    std::vector<std::int64_t> positions;
    std::vector<float> log_sum_exp;
  };

  static void check_cut(const HeadPlan<E>& plan, std::size_t layer, std::size_t head) {
    const HeadRule rule = plan.at(layer, head).rule(plan.shape().layer(layer).head_dim);
    require(
        can_cut(rule, false), "RankCache: head ", head, " of layer ", layer,
        " is cut by rows, and does not keep every row and read it; balance it with whole heads, or without "
        "cut_budgets");
  }
  [[nodiscard]] Cache one_head(const LayerShape& layer, const HeadSettings<E>& settings) const {
    LayerShape one = layer;
    one.q_heads = layer.queries_per_kv();
    one.kv_heads = 1;
    ModelShape shape{.layers = 1};
    shape.per_layer.push_back(one);
    return Cache{HeadPlan<E>{shape, settings}, options_, engine_};
  }

  void advance(Layer& layer, std::size_t tokens) const {
    layer.tokens += tokens;
    layer.committed = std::max(layer.committed, layer.tokens - std::min(layer.tokens, options_.max_rollback));
  }

  // Adds rows of the whole heads. The last one comes in a step, whose output nobody wants: rows before it are then
  // committed as after any step.
  void add_whole(std::size_t layer, const TensorView<const E>& k, const TensorView<const E>& v) {
    const std::size_t last = k.tokens - 1;
    for (std::size_t first = 0; first < last;) {
      const std::size_t count = std::min(options_.max_append, last - first);
      whole_->append(layer, k.slice(first, count), v.slice(first, count));
      first += count;
    }
    const std::size_t heads = k.heads * layers_[layer].group;
    const std::vector<float> query(heads * k.head_dim, 0.0F);
    std::vector<float> output(heads * v.head_dim);
    whole_->step(layer, TensorView<const float>{query.data(), 1, heads, k.head_dim}, k.slice(last, 1),
                 v.slice(last, 1), TensorView<float>{output.data(), 1, heads, v.head_dim});
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

  // Attends to the rows of the head that are here, and to those of the call's that are to stay here.
  CutCall attend(CutHead& cut, std::size_t first, const TensorView<const float>& q,
                 const TensorView<const float>& k, const TensorView<const float>& v,
                 const TensorView<float>& out) {
    CutCall call;
    const auto round = [](const float* row, std::size_t channels, std::vector<E>& to) {
      for (std::size_t i = 0; i < channels; ++i) to.push_back(E{row[i]});
    };
    for (std::size_t t = 0; t < q.tokens; ++t) {
      if (!cut.part.rows.has(first + t)) continue;
      round(k.row(t, 0), k.head_dim, call.keys);
      round(v.row(t, 0), v.head_dim, call.values);
      call.positions.push_back(static_cast<std::int64_t>(first + t));
    }
    std::vector<Segment> segments;
    std::size_t shown = 0;
    if (!cut.positions.empty()) {
      for (const Segment& segment : cut.cache.segments(0, 0, Read::all)) {
        segments.push_back(segment);
        segments.back().positions = cut.positions.data() + shown;
        shown += segment.rows;
      }
    }
    if (!call.positions.empty()) {
      const auto plane = [](const std::vector<E>& numbers, std::size_t channels) {
        return Plane{.format = {.encoding = encoding_of<E>},
                     .base = reinterpret_cast<const std::byte*>(numbers.data()),
                     .row_stride = channels * sizeof(E)};
      };
      Segment own;
      own.keys = plane(call.keys, k.head_dim);
      own.values = plane(call.values, v.head_dim);
      own.rows = call.positions.size();
      own.positions = call.positions.data();
      segments.push_back(own);
    }
    call.log_sum_exp.resize(q.tokens * q.heads);
    const std::span<const Segment> all{segments};
    LayerAttention work;
    work.queries = ConstTensor{q};
    work.out = MutableTensor{out};
    work.first_position = static_cast<std::int64_t>(first);
    work.heads = {&all, 1};
    work.options.log_sum_exp = call.log_sum_exp;
    engine_.attend(work);
    return call;
  }
  static void append(CutHead& cut, const CutCall& call, std::size_t head_dim, std::size_t value_dim) {
    for (std::size_t row = 0; row < call.positions.size(); ++row) {
      cut.cache.append(0, TensorView<const E>{call.keys.data() + row * head_dim, 1, 1, head_dim},
                       TensorView<const E>{call.values.data() + row * value_dim, 1, 1, value_dim});
      cut.positions.push_back(call.positions[row]);
    }
  }

  // Multiplies this rank's outputs of each cut head by its share of the weights of all ranks.
  void scale_parts(const Layer& own, std::size_t tokens, const std::vector<CutCall>& calls,
                   const TensorView<float>& out) {
    const std::size_t queries = tokens * own.group;
    std::vector<float> mine(own.merges.size() * queries, -std::numeric_limits<float>::infinity());
    for (std::size_t i = 0; i < own.cut.size(); ++i) {
      std::ranges::copy(calls[i].log_sum_exp, mine.begin() + static_cast<std::ptrdiff_t>(
                                                                 place(own, own.cut[i].part.head) * queries));
    }
    std::vector<float> all(mine.size() * ranks_->size());
    ranks_->gather(mine, all);
    for (std::size_t i = 0; i < own.cut.size(); ++i) {
      const std::size_t first = place(own, own.cut[i].part.head) * queries;
      for (std::size_t t = 0; t < tokens; ++t) {
        for (std::size_t g = 0; g < own.group; ++g) {
          const std::size_t query = first + t * own.group + g;
          SoftmaxState total;
          for (std::size_t rank = 0; rank < ranks_->size(); ++rank) {
            merge(total, {}, {all[rank * mine.size() + query], 1.0F}, {});
          }
          // Of rows of weight 0 alone outputs are 0, and any share of them is.
          const float share = rescale_factor(mine[query], total.max) / total.sum;
          float* row = out.row(t, (own.whole + i) * own.group + g);
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
  HeadPlan<E> plan_;  // of the whole model, as are the shards
  Shards shards_;
  ModelShape shape_;
  CacheOptions options_;
  Engine engine_;
  std::optional<Cache> whole_;  // where any head is whole
  std::vector<Layer> layers_;
};

}  // namespace kvpolicy::reference
