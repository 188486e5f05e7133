// SPDX-License-Identifier: Apache-2.0
//
// The KV cache of one sequence: all layers, every KV head under the policy that its plan gives it.
// An engine calls `step` once per layer and token chunk; everything tentative (rows that may be
// rolled back, the caller's own chunk) is the cache's business, so policies never undo anything.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/cache/cache_pool.hpp>
#include <kvpolicy/cache/call_checks.hpp>
#include <kvpolicy/cache/layer.hpp>
#include <kvpolicy/cache/layer_calls.hpp>
#include <kvpolicy/cache/other_plan.hpp>
#include <kvpolicy/cache/plan_checks.hpp>
#include <kvpolicy/cache/progress_checks.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/scalar_engine.hpp>
#include <kvpolicy/core/separate.hpp>
#include <kvpolicy/plan/cache_options.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy {

class SavedCache;
template <Element E, AttentionEngine Engine>
class Batch;

/// Gives the library's own code the layers of a cache and where its pages come from.
struct CacheLayers {
  template <class Cache>
  [[nodiscard]] static auto& of(Cache& cache) {
    return cache.layers_;
  }
  template <class Cache>
  [[nodiscard]] static auto& observed_rows_of(Cache& cache) {
    return cache.calls_.observed_rows();
  }
  /// @throws ConfigError for a cache that was moved from
  template <class Cache>
  [[nodiscard]] static PagePool& pool_of(Cache& cache) {
    static_cast<void>(held(cache.layers_));
    return cache.pool_.pool();
  }
};

/// One sequence: the rows of all layers, every KV head under the policy that the plan gives it.
/// Shapes: q [tokens, q_heads, head_dim], k [tokens, kv_heads, head_dim], v [tokens, kv_heads,
/// value_dim] and out [tokens, q_heads, value_dim], as the plan's ModelShape says of the layer; any of
/// the three element types, any token and head stride; keys already rotated to their text position.
/// `out` must not overlap the inputs. Whatever throws leaves rows, tokens and bytes as they were.
///
/// Layers have the model's numbers. A layer without a cache takes no call. A layer that reads another
/// one's cache takes `attend` alone, after that layer's `append` of the same tokens; it selects no rows,
/// adds no attention up and asks for no compression of its own. Where the call sets no softcap, the
/// shape's is taken.
///
/// DraftTokens may branch (core/token_tree.hpp). A call whose options name a tree adds the tree's last
/// nodes, which stand at `depth` after the text; earlier nodes came with the calls before, so a tree
/// may grow level by level. A query reads the text as its own position says, its node and the node's
/// ancestors. All nodes are tentative, at most `max_rollback` of them. Until `accept` keeps one path
/// or `truncate` drops them, every other call that would add, read or commit rows is refused.
///
/// Not synchronised. Forks share full pages but nothing that is ever written: each may be used by
/// its own thread. Move-only; copies are made by `fork`. A cache that was moved from holds 0 bytes and
/// can be assigned to or destroyed; every call for its rows throws ConfigError.
template <Element E, AttentionEngine Engine = ScalarEngine>
class KvCache {
 public:
  using element_type = E;
  using Plan = HeadPlan<E>;

  /// @throws ConfigError for options that do not work, alone or with the plan; ShapeError for `value_outputs` of a
  /// model with other heads
  explicit KvCache(Plan plan, const CacheOptions& options = {}, Engine engine = {});

  KvCache(KvCache&&) noexcept = default;
  KvCache& operator=(KvCache&&) noexcept = default;
  ~KvCache();

  /// An independent cache with the same rows: full pages are shared, open ones copied.
  /// @throws std::bad_alloc
  [[nodiscard]] KvCache fork() const {
    static_cast<void>(held(layers_));
    return KvCache{*this};
  }

  /// An independent cache with the same tokens under another plan of the same shape and element
  /// type, as if it had been fed them in one chunk: one prompt serves many plans. Committed rows go to
  /// the new heads, which quantise, summarise or compress themselves as they would have; heads that have
  /// the same policy and settings under both plans share full pages. The tail and a pending tree come
  /// along, and so do the latest queries, as many as this cache keeps: for a plan whose heads compress
  /// by more, `compress` says what is missing (CacheOptions::kept_queries keeps more). Selecting
  /// heads make a new selection. Needs memory for all rows of the heads that change.
  /// @throws ConfigError if the plan does not fit, or a head that changes holds not every row or holds
  /// rows quantised; ShapeError for rows that a new head cannot hold; std::bad_alloc, StorageError
  [[nodiscard]] KvCache fork_as(Plan plan) const;

  /// Forgets the text: plan, options and engine stay, and the next row of every layer stands at position
  /// 0 again. Rows go back to the memory resources, except for pages that forks share. A new tail and a new
  /// observation window are allocated before the old ones are released.
  /// @throws std::bad_alloc, with the cache as it was
  void clear() {
    static_cast<void>(held(layers_));
    layers_ = new_layers();
    calls_.observed_rows() = 0;
  }

  /// Attends one layer's queries to everything cached and to their own chunk, causally; then the
  /// chunk joins the cache. Rows are always appended: the first row of k stands at text position
  /// `tokens(layer)`, and a new text begins with `clear`. With a tree, row i stands at `depth` of its node
  /// after the text.
  /// @throws ShapeError, CapacityError, std::bad_alloc, StorageError (slow memory); RollbackError if
  /// a tree is pending that `options` does not name
  template <class Q, class K, class V, class Out>
  void step(std::size_t layer, const TensorView<Q>& q, const TensorView<K>& k, const TensorView<V>& v,
            const TensorView<Out>& out, const AttendOptions& options = {}) {
    step(layer, ConstTensor{q}, ConstTensor{k}, ConstTensor{v}, MutableTensor{out}, options);
  }

  /// The same for tensors whose element types are known only at run time.
  void step(std::size_t layer, const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
            const MutableTensor& out, const AttendOptions& options = {}) {
    calls_.step(own_layer(layer), {q, k, v, out}, completed(options, layer), options_);
  }

  /// The two halves of `step`, for engines that fuse work in between: `append` adds at most
  /// `max_append` rows after those that are there, `attend` reads with the queries of the latest `q.tokens` of them. Of
  /// the options `append` heeds `tree` alone; `attend` wants the same tree.
  /// @throws as `step`
  template <class K, class V>
  void append(std::size_t layer, const TensorView<K>& k, const TensorView<V>& v,
              const AttendOptions& options = {}) {
    append(layer, ConstTensor{k}, ConstTensor{v}, options);
  }
  template <class Q, class Out>
  void attend(std::size_t layer, const TensorView<Q>& q, const TensorView<Out>& out,
              const AttendOptions& options = {}) {
    attend(layer, ConstTensor{q}, MutableTensor{out}, options);
  }
  void append(std::size_t layer, const ConstTensor& k, const ConstTensor& v,
              const AttendOptions& options = {}) {
    calls_.append(own_layer(layer), k, v, options.tree, options_);
  }
  void attend(std::size_t layer, const ConstTensor& q, const MutableTensor& out,
              const AttendOptions& options = {}) {
    Layer& rows_of = read_by(layer);
    calls_.attend(rows_of, layer, plan_.shape().layer(layer).q_heads, q, out, completed(options, layer));
  }

  /// Takes back the rows from text position `tokens` on, in every layer; also after a step that
  /// failed half-way through the layers. The nodes of a tree count as rows after the text: of a
  /// pending tree the first ones stay that fit into `tokens`, pending still.
  /// @throws RollbackError if a layer has committed that far, or has not come that far.
  void truncate(std::size_t tokens);

  /// Keeps the nodes of `path` and drops all other nodes of the pending tree, in every layer. `path` leads from
  /// the text downwards; its nodes become tentative rows of the text. An empty path drops the whole tree.
  /// A selection that a node's query made is taken back as by `truncate`, unless the node and all nodes before it stay.
  /// @throws RollbackError if no tree is pending or a step failed half-way through the layers,
  /// ShapeError if `path` is no path of the tree
  void accept(std::span<const std::size_t> path);

  /// Whether rows read otherwise after a commit than before, for some head quantises: what a model says
  /// then depends on when they are committed (speculation/decoder.hpp).
  [[nodiscard]] bool commit_changes_rows() const { return plan_.commit_changes_rows(); }
  /// Hands all tentative rows to the policies: from now on they cannot be taken back.
  /// @throws RollbackError if a tree is pending, std::bad_alloc, StorageError
  void commit() {
    refuse_tree("commit");
    calls_.commit(layers_);
  }

  /// Commits, then lets every head with a budget drop the rows that it ranks lowest: of most scorers
  /// those that its latest queries attend to least.
  /// Heads of other policies stay as they are. If memory runs out, rows are committed, no more.
  /// @throws std::bad_alloc, StorageError, ShapeError if rows came without their queries (`append`
  /// alone), or were in no scoring pass that their scorer needs, RollbackError if a tree is pending
  void compress();
  /// The same for one layer, for engines that prefill layer by layer.
  /// @throws as above; ConfigError if heads of the layer compete with those of other layers (`adaptive_in_model`)
  void compress(std::size_t layer);

  /// Takes over what a scoring pass over a fork has found: heads whose scorer waits for it know of their rows what the
  /// same heads of `scored` do. `scored` was forked from this cache and has read more since (policy/kvzip_scorer.hpp);
  /// the cache itself has changed neither.
  /// @throws ConfigError if `scored` has another plan; ShapeError if it holds fewer tokens, or dropped rows since;
  /// RollbackError if a tree is pending
  void take_scores(const KvCache& scored);

  /// Tokens that every layer has seen, nodes of a pending tree included; `tokens(layer)` differs only
  /// inside a step.
  [[nodiscard]] std::size_t tokens() const {
    return std::ranges::min_element(held(layers_), {}, &Layer::tokens)->tokens;
  }
  [[nodiscard]] std::size_t tokens(std::size_t layer) const { return read_by(layer).tokens; }
  /// `truncate` goes back no further than this.
  [[nodiscard]] std::size_t commit_point() const {
    return std::ranges::max_element(held(layers_), {}, &Layer::committed)->committed;
  }

  /// Live bytes of row memory asked of the memory resources; pages shared with forks count in full.
  [[nodiscard]] std::size_t bytes() const;
  /// The part of `bytes()` that is in slow memory.
  [[nodiscard]] std::size_t slow_bytes() const { return sum(&Head::slow_bytes); }
  /// The part of `bytes()` that is in pages which a fork holds too.
  [[nodiscard]] std::size_t shared_bytes() const { return sum(&Head::shared_bytes); }
  /// Bookkeeping besides `bytes()`: the objects of cache, layers and heads, page tables, positions and
  /// selections, the plan's table, and the pool's unless the options gave the pool. Settings, which
  /// copies of a plan share, and the scratch memory of calls are not counted.
  [[nodiscard]] std::size_t overhead_bytes() const;

  /// Keys that were read besides those of attention itself: one for each row of a head that was
  /// looked at for a compression, or at a call because the head adds up its attention. Forks go on
  /// counting.
  [[nodiscard]] std::size_t observed_rows() const { return calls_.observed_rows(); }

  [[nodiscard]] const Plan& plan() const { return plan_; }
  [[nodiscard]] const CacheOptions& options() const { return options_; }
  [[nodiscard]] Engine& engine() { return calls_.engine(); }
  /// One head, whatever its policy. @throws ShapeError if there is no such layer or head
  [[nodiscard]] const Head& head(std::size_t layer, std::size_t head) const {
    const Layer& own = read_by(layer);
    require<ShapeError>(head < own.heads.size(), "KvCache: there is no KV head ", head, ", layer ",
                        own.number, " has ", own.heads.size());
    return *own.heads[head];
  }
  /// The policy of a head that has policy P.
  /// @throws ConfigError if the head has another one, ShapeError if there is no such layer or head
  template <KvPolicy P>
  [[nodiscard]] const P& policy(std::size_t layer, std::size_t head) const {
    const Head& own = this->head(layer, head);
    require(own.policy_type() == type_tag_of<P>(), "KvCache::policy: KV head ", head, " of layer ", layer,
            " has the policy ", plan_.at(read_by(layer).number, head).names().shown(), ", not ",
            policy_traits<P>::names().shown());
    return *static_cast<const P*>(own.policy());
  }

  /// How the latest queries attend, of which the cache has kept some (`kept_queries`), at most
  /// `queries`: for each KV head of the layer [group, rows], each row's probability summed over them,
  /// in the order of `segments`. What plans may be chosen by (fastgen.hpp). Returns their number.
  /// @throws ShapeError if rows came without their queries, RollbackError if a tree is pending
  std::size_t observe(std::size_t layer, std::size_t queries, std::vector<std::vector<float>>& sums);

  /// The cached rows that the next query of a head would read, for engines with attention of
  /// their own and for inspection; with a pending tree, what one right after the text would read, and
  /// all nodes. Valid until the cache next changes.
  [[nodiscard]] SegmentList segments(std::size_t layer, std::size_t head, Read read = Read::all) const {
    static_cast<void>(this->head(layer, head));  // refuses numbers of no head
    return read_by(layer).segments(head, read);
  }

 private:
  using Layer = CacheLayer<E>;

  static constexpr std::string_view name = "KvCache";  // in messages

  friend class SavedCache;        // save and load: cache/saved_cache.hpp
  friend class Batch<E, Engine>;  // many caches in one call: cache/batch.hpp
  friend struct CacheLayers;      // copies on another backend, and moving out

  KvCache(const KvCache&) = default;
  KvCache(Plan plan, const CacheOptions& options, Engine engine, CachePool pool);

  [[nodiscard]] static const CacheOptions& valid(const CacheOptions& options) {
    options.validate();
    return options;
  }

  [[nodiscard]] std::size_t sum(std::size_t (Head::*count)() const) const {
    std::size_t total = 0;
    for (const Layer& layer : layers_) {
      for (const HeadPtr& own : layer.heads) total += ((*own).*count)();
    }
    return total;
  }

  // This cache is new, and may be thrown away half-way.
  void take(const KvCache& other);

  // What a layer's heads are made with.
  [[nodiscard]] StorageContext context_of(const LayerShape& layer) const {
    StorageContext context = options_.context(layer.head_dim, layer.value_dim);
    context.pool = &pool_.pool();
    return context;
  }

  // The layers that have a cache, as they are before the first token.
  [[nodiscard]] std::vector<Layer> new_layers() const;

  // Rows whose attention is added up, and those of a compression that is due, are committed by their own
  // layer's `attend`, which is too early for the layers that read them too.
  void check_reading(std::size_t layer, const std::vector<Layer>& layers) const;

  // Where layer `number` stands in layers_, which leaves out layers without a cache.
  [[nodiscard]] std::size_t place_of(std::size_t number) const {
    const auto found = std::ranges::lower_bound(layers_, number, {}, &Layer::number);
    return static_cast<std::size_t>(found - layers_.begin());
  }

  // The layer whose rows layer `number` reads.
  // @throws ShapeError if there is no such layer or it reads none
  [[nodiscard]] const Layer& read_by(std::size_t number) const;
  [[nodiscard]] Layer& read_by(std::size_t number) {
    return const_cast<Layer&>(std::as_const(*this).read_by(number));
  }
  // The layer that keeps the rows of layer `number`. @throws ShapeError if it keeps none
  [[nodiscard]] Layer& own_layer(std::size_t number);

  // The call's options with what the layer itself says of its logits.
  [[nodiscard]] AttendOptions completed(const AttendOptions& options, std::size_t number) const {
    AttendOptions own = options;
    // Under -ffast-math a NaN may compare equal to 0; it is refused later.
    if (is_finite(own.softcap) && own.softcap == 0.0F) own.softcap = plan_.shape().layer(number).softcap;
    return own;
  }

  void refuse_tree(const char* call) const {
    for (const Layer& layer : held(layers_)) layer.tree.refuse(name, "::", call);
  }

  Plan plan_;
  CacheOptions options_;
  CachePool pool_;  // outlives the layers, whose pages go back to it
  std::vector<Layer> layers_;
  detail::LayerCalls<E, Engine> calls_;
};

// Outside the class for the sake of `extern template`, as in layer_calls.hpp.

template <Element E, AttentionEngine Engine>
KvCache<E, Engine>::KvCache(Plan plan, const CacheOptions& options, Engine engine)
    : KvCache{std::move(plan), options, std::move(engine), CachePool{valid(options)}} {}

template <Element E, AttentionEngine Engine>
KvCache<E, Engine>::KvCache(Plan plan, const CacheOptions& options, Engine engine, CachePool pool)
    : plan_{std::move(plan)}, options_{options}, pool_{std::move(pool)}, calls_{std::move(engine)} {
  layers_ = new_layers();
}

template <Element E, AttentionEngine Engine>
KvCache<E, Engine>::~KvCache() = default;

template <Element E, AttentionEngine Engine>
KvCache<E, Engine> KvCache<E, Engine>::fork_as(Plan plan) const {
  check_same_shape(name, plan_.shape(), plan.shape());
  static_cast<void>(held(layers_));
  KvCache other{std::move(plan), options_, calls_.engine(), pool_};
  other.take(*this);
  return other;
}

template <Element E, AttentionEngine Engine>
void KvCache<E, Engine>::truncate(std::size_t tokens) {
  check_truncate<Layer>(name, held(layers_), tokens, options_.max_rollback);
  for (Layer& layer : layers_) layer.truncate(tokens);
}

template <Element E, AttentionEngine Engine>
void KvCache<E, Engine>::accept(std::span<const std::size_t> path) {
  check_accept<Layer>(name, held(layers_), path);
  for (Layer& layer : layers_) layer.accept(path);
}

template <Element E, AttentionEngine Engine>
void KvCache<E, Engine>::compress() {
  refuse_tree("compress");
  const bool in_model = one_drops_in_model<Layer>(layers_);
  for (const Layer& layer : layers_) layer.check_ranked("compress", in_model);
  commit();
  calls_.compress(layers_);
}

template <Element E, AttentionEngine Engine>
void KvCache<E, Engine>::compress(std::size_t layer) {
  Layer& own = own_layer(layer);
  check_compressed_alone(name, layer, std::ranges::any_of(own.heads, [](const HeadPtr& head) {
                           return head->is_adaptive_in_model();
                         }));
  own.tree.refuse(name, "::compress");
  own.check_ranked("compress", false);
  calls_.commit({&own, 1});
  calls_.compress({&own, 1});
}

template <Element E, AttentionEngine Engine>
void KvCache<E, Engine>::take_scores(const KvCache& scored) {
  refuse_tree("take_scores");
  scored.refuse_tree("take_scores");
  require(scored.plan_ == plan_, name, "::take_scores: the scores are of a cache under another plan");
  const auto each = [&](auto act) {
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      for (std::size_t i = 0; i < layers_[l].heads.size(); ++i) {
        if (layers_[l].heads[i]->roles().waits_for_scoring) act(layers_[l], scored.layers_[l], i);
      }
    }
  };
  each([](const Layer& own, const Layer& other, std::size_t i) {
    check_grew_only(name, own.number, i, own.heads[i]->rows(), own.committed, other.heads[i]->rows(),
                    other.committed);
  });
  each([](Layer& own, const Layer& other, std::size_t i) {
    own.heads[i]->inherit(other.heads[i]->accumulated());
  });
}

template <Element E, AttentionEngine Engine>
std::size_t KvCache<E, Engine>::bytes() const {
  std::size_t total = 0;
  for (const Layer& layer : layers_) {
    total += layer.tail.bytes() + layer.queries.bytes();
    for (const HeadPtr& head : layer.heads) total += head->bytes();
  }
  return total;
}

template <Element E, AttentionEngine Engine>
std::size_t KvCache<E, Engine>::overhead_bytes() const {
  const std::size_t table = plan_.shape().kv_head_count() * sizeof(HeadSettings<E>);
  std::size_t total = sizeof(*this) + table + pool_.overhead_bytes();
  for (const Layer& layer : layers_) total += layer.overhead_bytes();
  return total;
}

template <Element E, AttentionEngine Engine>
std::size_t KvCache<E, Engine>::observe(std::size_t layer, std::size_t queries,
                                        std::vector<std::vector<float>>& sums) {
  const Layer& own = own_layer(layer);
  const std::size_t known = check_observe(name, own, queries);
  return calls_.observe(own, known, sums);
}

template <Element E, AttentionEngine Engine>
void KvCache<E, Engine>::take(const KvCache& other) {
  calls_.observed_rows() = other.observed_rows();
  for (std::size_t l = 0; l < layers_.size(); ++l) {
    Layer& own = layers_[l];
    take_layer(own, other.layers_[l], context_of(own.shape), [&](std::size_t head) {
      return plan_.at(own.number, head) == other.plan_.at(own.number, head);
    });
    calls_.compress_due(own);
  }
}

template <Element E, AttentionEngine Engine>
void KvCache<E, Engine>::check_reading(std::size_t layer, const std::vector<Layer>& layers) const {
  const std::size_t source = plan_.shape().cache_of(layer);
  if (source == layer) return;
  require(!std::ranges::find(layers, source, &Layer::number)->roles.accumulates, "KvCache: layer ", layer,
          " reads the cache of layer ", source, ", whose heads add up attention; give them another policy");
  for (std::size_t head = 0; head < plan_.shape().layer(source).kv_heads; ++head) {
    require(!plan_.at(source, head).compresses_by_itself(), "KvCache: layer ", layer,
            " reads the cache of layer ", source, ", whose KV head ", head,
            " compresses by itself (compress_every); use 0 and call `compress` between steps");
  }
}

template <Element E, AttentionEngine Engine>
const CacheLayer<E>& KvCache<E, Engine>::read_by(std::size_t number) const {
  static_cast<void>(held(layers_));
  const ModelShape& model = plan_.shape();
  require<ShapeError>(number < model.layers, "KvCache: there is no layer ", number, ", the plan has ",
                      model.layers);
  const std::size_t source = model.cache_of(number);
  require<ShapeError>(model.layer(source).kv_heads > 0, "KvCache: layer ", number,
                      " has no cache (its kv_heads is 0), so no call is made for it");
  return layers_[place_of(source)];
}

template <Element E, AttentionEngine Engine>
CacheLayer<E>& KvCache<E, Engine>::own_layer(std::size_t number) {
  Layer& layer = read_by(number);
  require<ShapeError>(layer.number == number, "KvCache: layer ", number, " reads the cache of layer ",
                      layer.number, " and has no rows of its own; it takes attend alone");
  return layer;
}

template <Element E, AttentionEngine Engine>
std::vector<CacheLayer<E>> KvCache<E, Engine>::new_layers() const {
  const ModelShape& model = plan_.shape();
  if (options_.value_outputs != nullptr) options_.value_outputs->check_fits(model);
  std::vector<Layer> layers;
  layers.reserve(model.layers);
  for (std::size_t layer = 0; layer < model.layers; ++layer) {
    const LayerShape shape = model.layer(layer);
    if (shape.kv_heads == 0) continue;
    const StorageContext context = context_of(shape);
    const std::size_t queries = std::max(plan_.observed_queries(layer), options_.kept_queries);
    Layer& added = layers.emplace_back(
        Layer{{},
              layer,
              shape,
              {},
              {},
              {options_.tail_rows(), shape.kv_heads, shape.head_dim, shape.value_dim, options_.memory},
              {queries, options_.tail_rows(), shape.q_heads, shape.head_dim, options_.memory}});
    check_sharing(name, plan_, layer);
    added.heads.reserve(shape.kv_heads);
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      const HeadSettings<E>& settings = plan_.at(layer, head);
      check_rollback(name, layer, head, settings.compresses_by_itself(), settings.roles().accumulates,
                     options_.max_rollback);
      StorageContext of_head = context;
      if (options_.value_outputs != nullptr) of_head.value_output = options_.value_outputs->head(layer, head);
      added.add(settings.make_head(of_head));
    }
  }
  for (std::size_t layer = 0; layer < model.layers; ++layer) check_reading(layer, layers);
  return layers;
}

/// `KvCache cache{plan}` and `KvCache cache{plan, options, engine}`, of any plan.
template <class... T>
KvCache(const HeadPlan<T...>&) -> KvCache<typename HeadPlan<T...>::element_type>;
template <class... T>
KvCache(const HeadPlan<T...>&, const CacheOptions&) -> KvCache<typename HeadPlan<T...>::element_type>;
template <class... T, AttentionEngine Engine>
KvCache(const HeadPlan<T...>&, const CacheOptions&,
        Engine) -> KvCache<typename HeadPlan<T...>::element_type, Engine>;

/// The caches over an engine, and their calls.
#define KVPOLICY_CACHE_INSTANCE(SPEC, E, ...)    \
  SPEC class detail::LayerCalls<E, __VA_ARGS__>; \
  SPEC class KvCache<E, __VA_ARGS__>;
/// Those over the plain engine.
#define KVPOLICY_PLAIN_CACHE_INSTANCE(SPEC, E) KVPOLICY_CACHE_INSTANCE(SPEC, E, ScalarEngine)
KVPOLICY_DECLARE_INSTANCES(KVPOLICY_PLAIN_CACHE_INSTANCE)

}  // namespace kvpolicy
