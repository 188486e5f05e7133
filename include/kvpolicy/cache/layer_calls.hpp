// SPDX-License-Identifier: Apache-2.0
//
// What a call does once its layer is found: it checks the tensors, attends, and hands rows to the policies
// and to the tail; afterwards selections are refreshed and heads compressed where it is time.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/cache/call_checks.hpp>
#include <kvpolicy/cache/compression.hpp>
#include <kvpolicy/cache/layer.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/bounded_attention.hpp>
#include <kvpolicy/core/scratch.hpp>
#include <kvpolicy/plan/cache_options.hpp>

namespace kvpolicy::detail {

/// The tensors of one step of a layer; shapes as KvCache states them.
struct StepTensors {
  ConstTensor q, k, v;
  MutableTensor out;
};

/// The engine of a cache and the memory that its calls work in. Each call throws what KvCache's call of
/// that name throws, and leaves the layer as it was then.
template <Element E, AttentionEngine Engine>
class LayerCalls {
 public:
  using Layer = CacheLayer<E>;

  explicit LayerCalls(Engine engine) : engine_{std::move(engine)} {}
  /// A fork starts with scratch memory of its own.
  LayerCalls(const LayerCalls& other) : engine_{other.engine_}, observed_rows_{other.observed_rows_} {}
  LayerCalls(LayerCalls&&) noexcept = default;
  LayerCalls& operator=(LayerCalls&&) noexcept = default;
  ~LayerCalls() = default;

  [[nodiscard]] Engine& engine() { return engine_; }
  [[nodiscard]] const Engine& engine() const { return engine_; }
  /// Keys that were read for compressions and for heads that add up attention.
  [[nodiscard]] std::size_t observed_rows() const { return observed_rows_; }
  [[nodiscard]] std::size_t& observed_rows() { return observed_rows_; }

  /// Attends to the cached rows and to the call's, which then join the cache.
  void step(Layer& layer, const StepTensors& call, const AttendOptions& options, const CacheOptions& limits);

  /// Adds rows, which stay tentative until the next call.
  void append(Layer& layer, const ConstTensor& k, const ConstTensor& v, const TokenTree* tree,
              const CacheOptions& limits);

  /// Reads with the queries of the latest rows; `reader` is the model's number of the layer that asks,
  /// which has `q_heads` query heads: `layer` itself or one that reads its rows.
  void attend(Layer& layer, std::size_t reader, std::size_t q_heads, const ConstTensor& q,
              const MutableTensor& out, const AttendOptions& options);

  // ---- the same in parts, for a batch, which runs the attention of all its sequences at once. After
  // `begin_*` follow the attention, `observe_call`, and `end_*`; or `abandon`, and the layer is as before.

  /// Checks the call, chooses selections, and obtains the memory that the call takes. The attention to be
  /// run points into this object, up to its next call; it has no tokens if there is nothing to do.
  /// @throws as KvCache::step, with the layer as it was
  [[nodiscard]] LayerAttention begin_step(Layer& layer, const StepTensors& call, const AttendOptions& options,
                                          const CacheOptions& limits);
  /// The call's rows join the cache.
  void end_step(Layer& layer, const StepTensors& call, const AttendOptions& options,
                const CacheOptions& limits);

  /// Returns whether there is anything to add.
  /// @throws as KvCache::append, with the layer as it was
  [[nodiscard]] bool begin_append(Layer& layer, const ConstTensor& k, const ConstTensor& v,
                                  const TokenTree* tree, const CacheOptions& limits);
  void end_append(Layer& layer, const ConstTensor& k, const ConstTensor& v, const TokenTree* tree,
                  const CacheOptions& limits);

  /// @throws as KvCache::attend, with the layer as it was
  [[nodiscard]] LayerAttention begin_attend(Layer& layer, std::size_t reader, std::size_t q_heads,
                                            const ConstTensor& q, const MutableTensor& out,
                                            const AttendOptions& options);
  void end_attend(Layer& layer, std::size_t reader, const ConstTensor& q, const AttendOptions& options);

  /// Adds the attention of a call up, for heads that want to know it.
  /// @throws what the engine throws
  void observe_call(const Layer& layer, const LayerAttention& call);
  static void abandon(Layer& layer) noexcept {
    layer.end_refresh(false);
    layer.release_unused();
  }

  /// Hands all tentative rows of these layers to the policies, or of none if memory runs out.
  void commit(std::span<Layer> layers);

  /// Heads that compress by themselves, where it is time.
  void compress_due(Layer& layer);

  /// Heads with a budget drop what they rank lowest; `only_due`: those that compress by themselves, where
  /// it is time.
  void compress(std::span<Layer> layers, bool only_due = false);

  /// For each KV head [group, rows]: the probability of each row summed over the latest `known` queries that
  /// the cache has kept, as its last call's options make them. Returns their number.
  std::size_t observe(const Layer& layer, std::size_t known, std::vector<std::vector<float>>& sums);

 private:
  static constexpr std::string_view cache_name = "KvCache";  // in messages

  // Parts of one head's rows in a call: the tail's ring may wrap among the rows of the text and among
  // those of the tree; the call's own come last.
  static constexpr std::size_t most_parts = 5;

  // The engine's scores, for a policy that does not know the engine's type.
  struct Scorer final : ChunkScorer {
    explicit Scorer(Engine& engine_) : engine{engine_} {}
    void score(const Plane& rows, std::span<const float> query, std::span<float> out) override {
      engine.score(rows, query, out);
    }
    Engine& engine;
  };

  // `tokens` tokens are about to be added.
  static void check_tree(const char* call, const Layer& layer, std::size_t tokens, const TokenTree* tree,
                         const CacheOptions& limits);

  // The oldest `leaving` rows of tail and chunk go to the policies, the others of the chunk to the tail.
  void keep_rows(Layer& layer, const ConstTensor& k, const ConstTensor& v, std::size_t leaving);

  void run(Layer& layer, const LayerAttention& attention);

  // What a call whose first query is that of row `position` reads, of the chunk too if there is one. Obtains
  // memory for the `leaving` rows that policies are given after it. Changes nothing if it throws.
  [[nodiscard]] LayerAttention begin(Layer& layer, const ConstTensor& q, const MutableTensor& out,
                                     std::size_t position, const AttendOptions& options, const ConstTensor* k,
                                     const ConstTensor* v, std::size_t leaving);

  // What the layer remembers of a call that was attended.
  void end(Layer& layer, const ConstTensor& q, std::size_t position, const AttendOptions& options);

  // Pages for committing `rows` rows in every head, or none at all: on failure the spare pages of
  // all `reserving` layers go back.
  void reserve(Layer& layer, std::size_t rows, std::span<Layer> reserving);

  [[nodiscard]] LayerAttention list_rows(const Layer& layer, const ConstTensor& q, const MutableTensor& out,
                                         std::size_t position, const AttendOptions& options,
                                         const ConstTensor* k, const ConstTensor* v, std::size_t leaving);

  // Selecting heads choose by one query of a call that begins at `position`.
  void prepare_refresh(Layer& layer, const ConstTensor& q, std::size_t position,
                       std::optional<std::size_t> chooser, bool wanted);

  // What follows once the rows are kept: it must not fail any more.
  void finish_call(Layer& layer, const ConstTensor& q, const AttendOptions& options);

  Engine engine_;
  std::size_t observed_rows_ = 0;
  // Scratch of a call.
  std::vector<SegmentList> shown_;
  std::vector<std::span<const Segment>> heads_;
  SegmentList rows_;
  Scratch<float> queries_;
  CallSums sums_;
};

// Outside the class, because what is defined inside it is inline: a file that declares the class `extern template`
// would compile it all the same.

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::step(Layer& layer, const StepTensors& call, const AttendOptions& options,
                                 const CacheOptions& limits) {
  const LayerAttention attention = begin_step(layer, call, options, limits);
  if (attention.queries.tokens == 0) return;
  run(layer, attention);
  end_step(layer, call, options, limits);
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::append(Layer& layer, const ConstTensor& k, const ConstTensor& v,
                                   const TokenTree* tree, const CacheOptions& limits) {
  if (begin_append(layer, k, v, tree, limits)) end_append(layer, k, v, tree, limits);
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::attend(Layer& layer, std::size_t reader, std::size_t q_heads,
                                   const ConstTensor& q, const MutableTensor& out,
                                   const AttendOptions& options) {
  const LayerAttention attention = begin_attend(layer, reader, q_heads, q, out, options);
  if (attention.queries.tokens == 0) return;
  run(layer, attention);
  end_attend(layer, reader, q, options);
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::observe_call(const Layer& layer, const LayerAttention& call) {
  if (layer.roles.accumulates) kvpolicy::observe_call(layer, engine_, call, sums_, observed_rows_);
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::commit(std::span<Layer> layers) {
  for (Layer& layer : layers) reserve(layer, layer.uncommitted(), layers);
  for (Layer& layer : layers) layer.commit_tail(layer.uncommitted());
  for (Layer& layer : layers) layer.release_unused();
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::compress_due(Layer& layer) {
  if (!layer.roles.compresses) return;
  const bool due = std::ranges::any_of(layer.heads, [&](const HeadPtr& head) { return layer.is_due(*head); });
  if (!due) return;
  commit({&layer, 1});
  compress({&layer, 1}, /*only_due=*/true);
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::check_tree(const char* call, const Layer& layer, std::size_t tokens,
                                       const TokenTree* tree, const CacheOptions& limits) {
  if (tree == nullptr) return layer.tree.refuse("KvCache::", call);
  layer.tree.check_grows_to(*tree, tokens, limits.max_rollback);
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::keep_rows(Layer& layer, const ConstTensor& k, const ConstTensor& v,
                                      std::size_t leaving) {
  const std::size_t from_tail = std::min(leaving, layer.uncommitted());
  const std::size_t from_chunk = leaving - from_tail;
  for (std::size_t head = 0; head < layer.heads.size(); ++head) {
    rows_.clear();
    if (from_tail > 0) {
      layer.tail.for_each_segment(head, layer.committed, layer.committed + from_tail,
                                  [&](const Segment& rows) { rows_.push_back(rows); });
    }
    if (from_chunk > 0) {
      rows_.push_back(call_segment(k, v, head, layer.tokens).part(0, from_chunk));
    }
    layer.heads[head]->end_call(rows_);
  }
  layer.committed += leaving;
  layer.tail.write(k, v, from_chunk, k.tokens, layer.tokens + from_chunk);
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::run(Layer& layer, const LayerAttention& attention) {
  KVPOLICY_TRY {
    if (attention.options.read == Read::bounded) {
      bounded_attention().attend(engine_, attention);
    } else {
      engine_.attend(attention);
    }
    observe_call(layer, attention);
  }
  KVPOLICY_CATCH_ALL {
    abandon(layer);
    KVPOLICY_RETHROW;
  }
}

template <Element E, AttentionEngine Engine>
LayerAttention LayerCalls<E, Engine>::begin(Layer& layer, const ConstTensor& q, const MutableTensor& out,
                                            std::size_t position, const AttendOptions& options,
                                            const ConstTensor* k, const ConstTensor* v, std::size_t leaving) {
  KVPOLICY_TRY {
    layer.attention_sink_bias.reserve(options.attention_sink_bias.size());
    rows_.reserve(most_parts);  // keep_rows must not fail
    if (options.read == Read::selected) {
      prepare_refresh(layer, q, position, options.selection_query, options.refresh_selection);
    }
    return list_rows(layer, q, out, position, options, k, v, leaving);
  }
  KVPOLICY_CATCH_ALL {
    abandon(layer);
    KVPOLICY_RETHROW;
  }
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::end(Layer& layer, const ConstTensor& q, std::size_t position,
                                const AttendOptions& options) {
  layer.end_refresh(true);
  layer.scale = options.scale;
  layer.softcap = options.softcap;
  layer.attention_sink_bias.assign(options.attention_sink_bias.begin(), options.attention_sink_bias.end());
  layer.queries.push(q, position);
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::reserve(Layer& layer, std::size_t rows, std::span<Layer> reserving) {
  if (rows == 0) return;
  KVPOLICY_TRY {
    for (const HeadPtr& head : layer.heads) head->reserve(rows);
  }
  KVPOLICY_CATCH_ALL {
    for (Layer& other : reserving) other.release_unused();
    KVPOLICY_RETHROW;
  }
}

template <Element E, AttentionEngine Engine>
LayerAttention LayerCalls<E, Engine>::list_rows(const Layer& layer, const ConstTensor& q,
                                                const MutableTensor& out, std::size_t position,
                                                const AttendOptions& options, const ConstTensor* k,
                                                const ConstTensor* v, std::size_t leaving) {
  const TokenTree* tree = options.tree;
  const std::size_t node = tree == nullptr ? 0 : tree->size() - q.tokens;  // of the first query
  const ReadRequest request = tree == nullptr
                                  ? ReadRequest{static_cast<std::int64_t>(position), q.tokens, options.read}
                                  : layer.tree.request(node, tree->size(), options.read);
  shown_.resize(layer.heads.size());
  heads_.clear();
  for (std::size_t head = 0; head < layer.heads.size(); ++head) {
    rows_.clear();
    layer.for_each_uncommitted(head, [&](const Segment& rows) { rows_.push_back(rows); });
    Segment chunk;
    if (k != nullptr) {
      chunk = call_segment(*k, *v, head, position);
      if (tree != nullptr) chunk = layer.tree.place(chunk, node);
    }
    SegmentList& list = shown_[head];
    list.clear();
    layer.heads[head]->begin_call({rows_, chunk, leaving, request}, list);
    heads_.emplace_back(list);
  }
  return {q, out, static_cast<std::int64_t>(position - node), heads_, options};
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::prepare_refresh(Layer& layer, const ConstTensor& q, std::size_t position,
                                            std::optional<std::size_t> chooser, bool wanted) {
  const std::size_t token = chooser.value_or(q.tokens - 1);
  const std::size_t group = layer.shape.queries_per_kv();
  const std::size_t head_dim = layer.shape.head_dim;
  if (!layer.roles.selects) return;
  Scorer scorer{engine_};
  for (std::size_t head = 0; head < layer.heads.size(); ++head) {
    Head& own = *layer.heads[head];
    if (!own.roles().selects || (!wanted && !own.selection_is_stale())) continue;
    const std::span<float> queries = queries_.take(group * head_dim);
    for (std::size_t i = 0; i < group; ++i) {
      load_dense(q.encoding, q.row(token, head * group + i), queries.subspan(i * head_dim, head_dim));
    }
    own.prepare_refresh(queries, scorer, position + token + 1);
  }
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::finish_call(Layer& layer, const ConstTensor& q, const AttendOptions& options) {
  // A read that shows all rows and asks for a refresh chooses for the reads that follow: after the
  // call, so that its own rows can be chosen.
  const bool shows_all = options.read == Read::all || options.read == Read::bounded;
  if (shows_all && options.refresh_selection) {
    KVPOLICY_TRY {
      prepare_refresh(layer, q, layer.tokens - q.tokens, options.selection_query, true);
      layer.end_refresh(true);
    }
    KVPOLICY_CATCH_ALL {
      // No memory, or slow memory that cannot be read: the next selected read chooses instead.
      layer.end_refresh(false);
      layer.forget_selection();
    }
  }
  KVPOLICY_TRY { compress_due(layer); }
  KVPOLICY_CATCH_ALL {
    // The step itself is done and its rows are kept; the next one tries again.
  }
}

template <Element E, AttentionEngine Engine>
LayerAttention LayerCalls<E, Engine>::begin_step(Layer& layer, const StepTensors& call,
                                                 const AttendOptions& options, const CacheOptions& limits) {
  const auto& [q, k, v, out] = call;
  const LayerShape& shape = layer.shape;
  const std::size_t tokens = q.tokens;
  check_tensor("q", q, tokens, shape.q_heads, shape.head_dim);
  check_tensor("k", k, tokens, shape.kv_heads, shape.head_dim);
  check_tensor("v", v, tokens, shape.kv_heads, shape.value_dim);
  check_tensor("out", out, tokens, shape.q_heads, shape.value_dim);
  check_written_once(out);
  check_options(options, tokens, shape.q_heads, shape.kv_heads);
  check_tree("step", layer, tokens, options.tree, limits);
  check_room(cache_name, layer, tokens, limits.max_tokens);
  if (tokens == 0) return {};
  check_range<E>("k", k);
  check_range<E>("v", v);
  if (options.tree != nullptr) layer.tree.prepare(*options.tree, layer.text());
  return begin(layer, q, out, layer.tokens, options, &k, &v, layer.leaving(tokens, limits.max_rollback));
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::end_step(Layer& layer, const StepTensors& call, const AttendOptions& options,
                                     const CacheOptions& limits) {
  const std::size_t tokens = call.q.tokens;
  end(layer, call.q, layer.tokens, options);
  keep_rows(layer, call.k, call.v, layer.leaving(tokens, limits.max_rollback));
  layer.tokens += tokens;
  if (options.tree != nullptr) layer.tree.keep(*options.tree);
  if (layer.roles.accumulates) layer.accumulate(sums_.of_heads, layer.shape.queries_per_kv());
  finish_call(layer, call.q, options);
}

template <Element E, AttentionEngine Engine>
bool LayerCalls<E, Engine>::begin_append(Layer& layer, const ConstTensor& k, const ConstTensor& v,
                                         const TokenTree* tree, const CacheOptions& limits) {
  const LayerShape& shape = layer.shape;
  const std::size_t tokens = k.tokens;
  check_tensor("k", k, tokens, shape.kv_heads, shape.head_dim);
  check_tensor("v", v, tokens, shape.kv_heads, shape.value_dim);
  check_append(cache_name, tokens, limits.max_append);
  check_tree("append", layer, tokens, tree, limits);
  check_room(cache_name, layer, tokens, limits.max_tokens);
  if (tokens == 0) return false;
  check_range<E>("k", k);
  check_range<E>("v", v);
  for (std::size_t head = 0; head < layer.heads.size(); ++head) {
    layer.heads[head]->check(call_segment(k, v, head, layer.tokens));
  }
  if (tree != nullptr) layer.tree.prepare(*tree, layer.text());
  reserve(layer, layer.leaving(0, limits.max_rollback), {&layer, 1});
  return true;
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::end_append(Layer& layer, const ConstTensor& k, const ConstTensor& v,
                                       const TokenTree* tree, const CacheOptions& limits) {
  // The new rows stay in the tail until the next call, so that `attend` finds the policies as
  // they were before them: a window must not have moved on, a row not be quantised yet.
  layer.commit_tail(layer.leaving(0, limits.max_rollback));
  layer.tail.write(k, v, 0, k.tokens, layer.tokens);
  layer.release_unused();
  layer.tokens += k.tokens;
  if (tree != nullptr) layer.tree.keep(*tree);
}

template <Element E, AttentionEngine Engine>
LayerAttention LayerCalls<E, Engine>::begin_attend(Layer& layer, std::size_t reader, std::size_t q_heads,
                                                   const ConstTensor& q, const MutableTensor& out,
                                                   const AttendOptions& options) {
  const LayerShape& shape = layer.shape;
  check_tensor("q", q, q.tokens, q_heads, shape.head_dim);
  check_tensor("out", out, q.tokens, q_heads, shape.value_dim);
  check_written_once(out);
  check_options(options, q.tokens, q_heads, shape.kv_heads);
  require<ShapeError>(q.tokens <= layer.uncommitted(), "KvCache::attend: ", q.tokens,
                      " queries, but only the latest ", layer.uncommitted(), " rows of layer ", layer.number,
                      " have not been committed");
  if (options.tree == nullptr) {
    layer.tree.refuse("KvCache::attend");
  } else {
    layer.tree.check_is(*options.tree, q.tokens);
  }
  if (q.tokens == 0) return {};
  const std::size_t position = layer.tokens - q.tokens;
  if (layer.number != reader) {
    require<ShapeError>(!options.refresh_selection, "KvCache::attend: refresh_selection for layer ", reader,
                        ", but layer ", layer.number, ", whose cache it reads, selects for both");
    return list_rows(layer, q, out, position, options, nullptr, nullptr, 0);
  }
  // What is added up cannot be taken back, so the rows it belongs to may not be either.
  return begin(layer, q, out, position, options, nullptr, nullptr,
               layer.roles.accumulates ? layer.uncommitted() : 0);
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::end_attend(Layer& layer, std::size_t reader, const ConstTensor& q,
                                       const AttendOptions& options) {
  if (layer.number != reader) return;
  end(layer, q, layer.tokens - q.tokens, options);
  if (layer.roles.accumulates) {
    layer.commit_tail(layer.uncommitted());
    layer.accumulate(sums_.of_heads, layer.shape.queries_per_kv());
  }
  layer.release_unused();
  finish_call(layer, q, options);
}

template <Element E, AttentionEngine Engine>
void LayerCalls<E, Engine>::compress(std::span<Layer> layers, bool only_due) {
  Compression<Layer, Engine>{engine_, observed_rows_}.run(layers, only_due);
}

template <Element E, AttentionEngine Engine>
std::size_t LayerCalls<E, Engine>::observe(const Layer& layer, std::size_t known,
                                           std::vector<std::vector<float>>& sums) {
  const LayerShape& shape = layer.shape;
  std::vector<SegmentList> shown(shape.kv_heads);
  std::vector<std::span<const Segment>> heads(shape.kv_heads);
  std::vector<std::span<float>> views(shape.kv_heads);
  sums.resize(shape.kv_heads);
  for (std::size_t head = 0; head < shape.kv_heads; ++head) {
    shown[head] = layer.segments(head, Read::all);
    sums[head].assign(shape.queries_per_kv() * count_rows(shown[head]), 0.0F);
    heads[head] = shown[head];
    views[head] = sums[head];
  }
  return observe_latest(layer, engine_, known, Votes::mean, heads, views);
}

}  // namespace kvpolicy::detail
