// SPDX-License-Identifier: Apache-2.0
//
// One rank's part of a cache (plan/shards.hpp): a KvCache with the heads that it holds whole, and the rows that are its
// own of each head that is cut. Attention over a cut head needs one message a layer, of log-sum-exps alone: a rank
// multiplies its outputs by its share of all weights, and the sum over ranks that follows the output projection, which
// is linear, adds up the parts.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/cache/batch.hpp>
#include <kvpolicy/cache/call_checks.hpp>
#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/cache/saved_cache.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/attention_state.hpp>
#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/state/archive.hpp>
#include <reference_model/language_model.hpp>
#include <reference_model/parallel/communicator.hpp>
#include <reference_model/parallel/cut_head.hpp>
#include <reference_model/parallel/shard_checks.hpp>
#include <reference_model/parallel/shard_parts.hpp>
#include <reference_model/parallel/tensor_parts.hpp>

namespace kvpolicy::reference {

/// One sequence's rows of element type E, as KvCache: what that says of a call holds of this. Every rank makes the same
/// calls; what fails on one fails on all, a step with the model's next message (ParallelLlama). Not synchronised;
/// `ranks` must outlive it. After an error other than a refusal (ShapeError, ConfigError, RollbackError) the cache is
/// of no further use, since ranks may have come differently far.
///
/// A token tree needs whole heads, as a bounded read does, and log-sum-exps are not told.
template <Element E, class Engine = ScalarEngine>
class RankCache {
 public:
  using element_type = E;
  using Plan = HeadPlan<E>;
  using Sequence = BatchSequence<RankCache>;
  static constexpr bool merges_cut_heads = true;

  /// `plan` and `shards` are those of the whole model.
  /// @throws ConfigError, on every rank, for shards of another shape or number of ranks, a cut head that does not keep
  /// every row and read it, heads on several ranks that share budgets, or a layer that reads the cache of another; if
  /// ranks have another plan, other shards or options
  RankCache(const Plan& plan, const Shards& shards, Communicator& ranks, const CacheOptions& options = {},
            Engine engine = {})
      : ranks_{&ranks},
        model_{std::make_shared<const Model>(plan, shards)},
        options_{options},
        engine_{std::move(engine)} {
    require_same(ranks, "plan", SavedCache::digest_of(plan));
    require_same(ranks, "shards", digest_of(shards));
    require_same(ranks, "cache options",
                 digest(options_.max_rollback, options_.max_append, options_.max_tokens,
                        options_.kept_queries, options_.page_rows));
    check_shards(plan, shards, ranks.size());
    commit_changes_rows_ = plan.commit_changes_rows();
    shape_ = shape_of_rank(plan.shape(), shards, ranks.rank());
    together(ranks, [&] { make(plan, shards, ranks.rank()); });
  }
  RankCache(RankCache&&) noexcept = default;
  RankCache& operator=(RankCache&&) noexcept = default;

  /// An independent cache with the same rows, which shares their full pages.
  /// @throws std::bad_alloc, on this rank alone
  [[nodiscard]] RankCache fork() const { return RankCache{*this}; }

  /// Of the whole model.
  [[nodiscard]] const Plan& plan() const { return model_->plan; }
  [[nodiscard]] const Shards& shards() const { return model_->shards; }
  [[nodiscard]] Communicator& ranks() const { return *ranks_; }
  /// Of this rank's heads and parts of heads.
  [[nodiscard]] const ModelShape& shape() const { return shape_; }
  [[nodiscard]] const CacheOptions& options() const { return options_; }
  [[nodiscard]] Engine& engine() { return engine_; }
  [[nodiscard]] bool commit_changes_rows() const { return commit_changes_rows_; }

  /// Tokens of the text that every layer has seen, nodes of a pending tree included; inside a forward pass some have
  /// seen more.
  [[nodiscard]] std::size_t tokens() const {
    return std::ranges::min_element(layers_, {}, &Layer::tokens)->tokens;
  }
  [[nodiscard]] std::size_t tokens(std::size_t layer) const { return known(layer).tokens; }
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
      for (const Cut& cut : layer.cut) total += cut.bytes();
    }
    return total;
  }

  /// One layer's attention, on every rank at once: q, k and v have the heads of `parts_in_order`, of tokens that follow
  /// those that are there. What `out` has of a cut head is to be added up over ranks. Queries read the call's own rows
  /// rounded to E.
  /// @throws ShapeError if a tensor has other heads, or a number does not fit E; ConfigError for a tree or a bounded
  /// read of a model with cut heads; as KvCache::step; CommunicationError
  template <class K>
  void step(std::size_t layer, TensorView<const float> q, TensorView<K> k, TensorView<K> v,
            TensorView<float> out, const AttendOptions& options = {}) {
    const Sequence one{this, options};
    const std::array<std::int32_t, 2> indptr{0, static_cast<std::int32_t>(q.tokens)};
    for (const LeftOut& left_out : step_all(layer, {&one, 1}, indptr, q, k, v, out))
      std::rethrow_exception(left_out.error);
  }
  /// The same for several sequences at once, as Batch::step, with one message for all; their shards are the same.
  /// Returns the sequences that were left out on this rank.
  /// @throws as `step`
  template <class K>
  static std::vector<LeftOut> step_all(std::size_t layer, std::span<const Sequence> sequences,
                                       std::span<const std::int32_t> indptr, TensorView<const float> q,
                                       TensorView<K> k, TensorView<K> v, TensorView<float> out);

  /// Adds rows of tokens that follow those that are there, whose attention was computed elsewhere
  /// (prefill_over_ranks.hpp): k and v have the heads of `parts_in_order`. Of a head that is cut only this rank's rows
  /// are read, and of a window only those count that its policy keeps in the end. No message.
  /// @throws ShapeError if a tensor has other heads, or a policy cannot keep a row; CapacityError past `max_tokens`;
  /// RollbackError while a tree is pending; std::bad_alloc, StorageError, after which some heads have rows that others
  /// lack
  void add(std::size_t layer, TensorView<const E> k, TensorView<const E> v) {
    check_layer(layer);
    Layer& own = layers_[layer];
    const std::size_t parts = own.whole + own.cut.size();
    require<ShapeError>(k.heads == parts && v.heads == parts && k.tokens == v.tokens, "RankCache: layer ",
                        layer, " has ", parts, " parts here; the call brings keys of ", k.heads,
                        " heads and ", k.tokens, " tokens, values of ", v.heads, " and ", v.tokens);
    refuse_tree("add");
    check_room(own, k.tokens);
    if (k.tokens == 0) return;
    if (own.whole > 0) add_whole(layer, heads_of(k, 0, own.whole), heads_of(v, 0, own.whole));
    for (std::size_t i = 0; i < own.cut.size(); ++i) {
      Cut& cut = own.cut[i];
      cut.append(cut.own_rows(own.tokens, ConstTensor{heads_of(k, own.whole + i, 1)},
                              ConstTensor{heads_of(v, own.whole + i, 1)}));
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
      for (Cut& cut : layer.cut) cut.truncate(tokens);
      layer.nodes -= std::min(layer.nodes, layer.tokens - tokens);
      layer.tokens = tokens;
    }
  }
  /// As KvCache::accept. @throws RollbackError if no tree is pending; as KvCache::accept
  void accept(std::span<const std::size_t> path) {
    require_even();
    require<RollbackError>(layers_.front().nodes >= std::max<std::size_t>(path.size(), 1),
                           "RankCache::accept: a path of ", path.size(), " nodes, the pending tree has ",
                           layers_.front().nodes);
    if (whole_) whole_->accept(path);
    for (Layer& layer : layers_) {
      layer.tokens -= layer.nodes - path.size();
      layer.nodes = 0;
    }
  }
  /// As KvCache::commit. @throws also RankError
  void commit() {
    refuse_tree("commit");
    together(*ranks_, [&] {
      if (whole_) whole_->commit();
      for (Layer& layer : layers_) {
        for (Cut& cut : layer.cut) cut.commit();
      }
    });
    for (Layer& layer : layers_) layer.committed = layer.tokens;
  }
  /// As KvCache::compress. Cut heads keep every row. @throws also RankError
  void compress() {
    commit();
    together(*ranks_, [&] {
      if (whole_) whole_->compress();
    });
  }

 private:
  using Cache = KvCache<E, Engine>;
  using Cut = CutHead<E, Engine>;

  struct Model {
    Model(const Plan& plan_, const Shards& shards_) : plan{plan_}, shards{shards_} {}
    Plan plan;
    Shards shards;
  };
  struct Layer {
    Layer() = default;
    Layer(Layer&&) noexcept = default;
    Layer& operator=(Layer&&) noexcept = default;
    Layer(const Layer& other)
        : whole{other.whole},
          group{other.group},
          merges{other.merges},
          tokens{other.tokens},
          committed{other.committed},
          nodes{other.nodes} {
      for (const Cut& one : other.cut) cut.push_back(one.fork());
    }

    std::size_t whole = 0;
    std::size_t group = 0;  // query heads of a KV head
    std::vector<Cut> cut = {};
    std::vector<HeadMerge> merges = {};  // of all ranks
    std::size_t tokens = 0;
    std::size_t committed = 0;  // of them, which cannot be taken back
    std::size_t nodes = 0;      // of a pending tree, the last of them
  };

  RankCache(const RankCache& other)
      : ranks_{other.ranks_},
        model_{other.model_},
        shape_{other.shape_},
        options_{other.options_},
        engine_{other.engine_},
        commit_changes_rows_{other.commit_changes_rows_},
        layers_{other.layers_} {
    if (other.whole_) whole_.emplace(other.whole_->fork());
  }

  void make(const Plan& plan, const Shards& shards, std::size_t rank) {
    ModelShape whole = plan.shape();
    std::vector<std::vector<std::size_t>> heads(whole.layers);
    bool any = false;
    for (std::size_t layer = 0; layer < whole.layers; ++layer) {
      const LayerShape own = plan.shape().layer(layer);
      Layer& made = layers_.emplace_back();
      made.merges = shards.merges(layer);
      for (const HeadPart& part : parts_in_order(shards, layer, rank)) {
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
    Plan own{whole};
    for (std::size_t layer = 0; layer < whole.layers; ++layer) {
      for (std::size_t i = 0; i < heads[layer].size(); ++i)
        own.set(layer, i, plan.at(layer, heads[layer][i]));
    }
    whole_.emplace(own, options_, engine_);
  }
  [[nodiscard]] Cache one_head(const LayerShape& layer, const HeadSettings<E>& settings) const {
    LayerShape one = layer;
    one.q_heads = layer.queries_per_kv();
    one.kv_heads = 1;
    ModelShape shape{.layers = 1};
    shape.per_layer.push_back(one);
    CacheOptions options = options_;
    options.value_outputs = nullptr;  // no head that is cut weighs its rows
    options.max_tokens = 0;           // it knows its own rows only
    return Cache{Plan{shape, settings}, options, engine_};
  }

  void check_layer(std::size_t layer) const {
    require<ShapeError>(layer < layers_.size(), "RankCache: there is no layer ", layer, ", there are ",
                        layers_.size());
  }
  [[nodiscard]] const Layer& known(std::size_t layer) const {
    check_layer(layer);
    return layers_[layer];
  }
  [[nodiscard]] bool has_cut_heads() const {
    return std::ranges::any_of(layers_, [](const Layer& layer) { return !layer.merges.empty(); });
  }
  void refuse_tree(const char* call) const {
    for (const Layer& layer : layers_) {
      require<RollbackError>(layer.nodes == 0, "RankCache::", call, ": a tree of ", layer.nodes,
                             " nodes is pending; accept a path, or truncate");
    }
  }
  void check_room(const Layer& layer, std::size_t tokens) const {
    require<CapacityError>(options_.max_tokens == 0 || tokens <= options_.max_tokens - layer.tokens,
                           "RankCache: ", tokens, " more tokens after ", layer.tokens,
                           " exceed max_tokens = ", options_.max_tokens);
  }
  void check_call(std::size_t layer, const AttendOptions& options, std::size_t tokens) const {
    require(options.log_sum_exp.empty() && options.attention_sink_bias.empty(),
            "RankCache: log-sum-exps and sink logits are not served over ranks");
    require(!has_cut_heads() || options.tree == nullptr,
            "RankCache: a tree of draft tokens needs whole heads, and some are cut by rows; draft chains, or "
            "balance with cut_rows = false");
    require(!has_cut_heads() || options.read != Read::bounded,
            "RankCache: a bounded read needs whole heads, and some are cut by rows; balance with cut_rows = "
            "false");
    const Layer& own = layers_[layer];
    check_room(own, tokens);
    require<RollbackError>(own.nodes == 0 || options.tree != nullptr, "RankCache::step: a tree of ",
                           own.nodes, " nodes is pending; accept a path, or truncate");
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
  [[nodiscard]] static std::size_t place(const Layer& own, std::size_t head) {
    return static_cast<std::size_t>(std::ranges::find(own.merges, head, &HeadMerge::head) -
                                    own.merges.begin());
  }
  static void scale_parts(const Layer& own, const TensorView<float>& out, std::span<const float> all,
                          std::size_t ranks, std::size_t rank, std::size_t first_query);
  void keep(std::size_t layer, std::span<const typename Cut::Call> calls, std::size_t tokens,
            const AttendOptions& options) {
    Layer& own = layers_[layer];
    for (std::size_t i = 0; i < own.cut.size(); ++i) own.cut[i].append(calls[i]);
    if (options.tree != nullptr) own.nodes += tokens;
    advance(own, tokens);
  }
  void advance(Layer& layer, std::size_t tokens) const {
    layer.tokens += tokens;
    const std::size_t text = layer.tokens - layer.nodes;
    layer.committed = std::max(layer.committed, text - std::min(text, options_.max_rollback));
  }

  Communicator* ranks_;
  std::shared_ptr<const Model> model_;
  ModelShape shape_;
  CacheOptions options_;
  Engine engine_;
  bool commit_changes_rows_ = false;
  std::optional<Cache> whole_;  // where any head is whole
  std::vector<Layer> layers_;
};

// Multiplies this rank's outputs of each cut head by its share of the weights of all ranks. `all` are the log-sum-exps
// of every rank, [ranks, queries of the call]; a sequence's begin at `first_query`.
template <Element E, class Engine>
void RankCache<E, Engine>::scale_parts(const Layer& own, const TensorView<float>& out,
                                       std::span<const float> all, std::size_t ranks, std::size_t rank,
                                       std::size_t first_query) {
  const std::size_t of_rank = all.size() / ranks;
  for (std::size_t i = 0; i < own.cut.size(); ++i) {
    const std::size_t first = first_query + place(own, own.cut[i].part().head) * out.tokens * own.group;
    for (std::size_t t = 0; t < out.tokens; ++t) {
      for (std::size_t g = 0; g < own.group; ++g) {
        const std::size_t query = first + t * own.group + g;
        SoftmaxState total;
        for (std::size_t r = 0; r < ranks; ++r) merge(total, {}, {all[r * of_rank + query], 1.0F}, {});
        // Of rows of weight 0 alone outputs are 0, and any share of them is.
        const float share = rescale_factor(all[rank * of_rank + query], total.max) / total.sum;
        float* row = out.row(t, (own.whole + i) * own.group + g);
        for (std::size_t channel = 0; channel < out.head_dim; ++channel) row[channel] *= share;
      }
    }
  }
}

template <Element E, class Engine>
template <class K>
std::vector<LeftOut> RankCache<E, Engine>::step_all(std::size_t layer, std::span<const Sequence> sequences,
                                                    std::span<const std::int32_t> indptr,
                                                    TensorView<const float> q, TensorView<K> k,
                                                    TensorView<K> v, TensorView<float> out) {
  if (sequences.empty()) return {};
  const RankCache& first = *sequences.front().cache;
  Communicator& ranks = *first.ranks_;
  const std::vector<HeadMerge> merges = first.known(layer).merges;  // the same on all ranks
  const std::size_t group = first.layers_[layer].group;
  const std::size_t queries = static_cast<std::size_t>(indptr.back()) * group;
  std::vector<std::vector<typename Cut::Call>> calls(sequences.size());
  std::vector<float> mine(merges.size() * queries, -std::numeric_limits<float>::infinity());
  const auto part = [&](const auto& tensor, std::size_t i) {
    const auto begin = static_cast<std::size_t>(indptr[i]);
    return tensor.slice(begin, static_cast<std::size_t>(indptr[i + 1]) - begin);
  };
  // Where a sequence's log-sum-exps begin: of each cut head all its queries.
  const auto first_query = [&](std::size_t i) {
    return static_cast<std::size_t>(indptr[i]) * group * merges.size();
  };
  std::exception_ptr failed;
  try {
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      RankCache& cache = *sequences[i].cache;
      Layer& own = cache.layers_[layer];
      const std::size_t parts = own.whole + own.cut.size();
      require<ShapeError>(
          q.heads == parts * own.group && out.heads == q.heads && k.heads == parts && v.heads == parts,
          "RankCache: layer ", layer, " has ", parts, " parts of ", own.group,
          " query heads here; the call brings ", q.heads, " query and ", k.heads, " KV heads");
      require<ShapeError>(k.tokens == q.tokens && v.tokens == q.tokens && out.tokens == q.tokens,
                          "RankCache: q, k, v and out must have as many tokens");
      require(own.merges == merges, "RankCache: sequences of one call must have the same shards");
      const auto own_k = part(k, i);
      const auto own_v = part(v, i);
      cache.check_call(layer, sequences[i].options, own_k.tokens);
      if (parts > 0) {
        check_range<E>("k", ConstTensor{own_k});
        check_range<E>("v", ConstTensor{own_v});
      }
      for (std::size_t c = 0; c < own.cut.size(); ++c) {
        const std::size_t head = own.whole + c;
        calls[i].push_back(own.cut[c].attend(
            own.tokens, ConstTensor{heads_of(part(q, i), head * group, group)},
            ConstTensor{heads_of(own_k, head, 1)}, ConstTensor{heads_of(own_v, head, 1)},
            MutableTensor{heads_of(part(out, i), head * group, group)}, sequences[i].options));
        std::ranges::copy(
            calls[i].back().log_sum_exp,
            mine.begin() + static_cast<std::ptrdiff_t>(first_query(i) + place(own, own.cut[c].part().head) *
                                                                            own_k.tokens * group));
      }
    }
  } catch (...) {
    failed = std::current_exception();
  }
  if (!merges.empty()) {  // also after a failure, for the others wait for it
    std::vector<float> all(mine.size() * ranks.size());
    ranks.gather(mine, all);
    for (std::size_t i = 0; failed == nullptr && i < sequences.size(); ++i) {
      scale_parts(sequences[i].cache->layers_[layer], part(out, i), all, ranks.size(), ranks.rank(),
                  first_query(i));
    }
  }
  if (failed != nullptr) std::rethrow_exception(failed);
  // Nothing has changed yet, and no message follows.
  std::vector<LeftOut> left_out;
  const std::size_t whole = first.layers_[layer].whole;
  if (whole > 0) {
    const std::vector<E> keys = rounded<E>(heads_of(k, 0, whole));
    const std::vector<E> values = rounded<E>(heads_of(v, 0, whole));
    std::vector<BatchSequence<Cache>> own;
    for (const Sequence& one : sequences) own.push_back({&*one.cache->whole_, one.options});
    Batch<E, Engine> batch{first.engine_};
    const auto found = batch.step(
        layer, std::span<const BatchSequence<Cache>>{own}, indptr, heads_of(q, 0, whole * group),
        TensorView<const E>{keys.data(), k.tokens, whole, k.head_dim},
        TensorView<const E>{values.data(), v.tokens, whole, v.head_dim}, heads_of(out, 0, whole * group));
    left_out.assign(found.begin(), found.end());
  }
  for (std::size_t i = 0; i < sequences.size(); ++i) {
    if (std::ranges::find(left_out, i, &LeftOut::sequence) != left_out.end()) continue;
    try {
      sequences[i].cache->keep(layer, calls[i], part(q, i).tokens, sequences[i].options);
    } catch (const std::bad_alloc&) {
      left_out.push_back({i, std::current_exception()});
    } catch (const StorageError&) {
      left_out.push_back({i, std::current_exception()});
    }
  }
  std::ranges::sort(left_out, {}, &LeftOut::sequence);
  return left_out;
}

/// Many RankCaches in one call: what Batch is to KvCache.
template <Element E, class Engine>
class RankBatch {
 public:
  using Cache = RankCache<E, Engine>;
  explicit RankBatch(const Engine&) {}

  template <class K>
  std::vector<LeftOut> step(std::size_t layer, std::span<const BatchSequence<Cache>> sequences,
                            std::span<const std::int32_t> indptr, TensorView<const float> q, TensorView<K> k,
                            TensorView<K> v, TensorView<float> out) {
    return Cache::step_all(layer, sequences, indptr, q, k, v, out);
  }
};
template <Element E, class Engine>
struct BatchOf<RankCache<E, Engine>> {
  using type = RankBatch<E, Engine>;
};

}  // namespace kvpolicy::reference
