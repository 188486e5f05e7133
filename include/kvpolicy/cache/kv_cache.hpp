// SPDX-License-Identifier: Apache-2.0
//
// The KV cache of one sequence: all layers, every KV head under the policy that its plan gives it.
// An engine calls `step` once per layer and token chunk; everything tentative (rows that may be
// rolled back, the caller's own chunk) is the cache's business, so policies never undo anything.
#pragma once

#include <algorithm>
#include <cmath>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <variant>
#include <vector>

#include <kvpolicy/cache/query_window.hpp>
#include <kvpolicy/cache/tail.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/scalar_engine.hpp>
#include <kvpolicy/plan/cache_options.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy {

/// Shapes: q and out [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim], any of the
/// three element types, any token and head stride; keys already rotated to their text position.
/// `out` must not overlap the inputs. Whatever throws leaves rows, tokens and bytes as they were.
///
/// Not synchronised. Forks share full pages but nothing that is ever written: each may be used by
/// its own thread. Move-only; copies are made by `fork`.
template <class Plan, AttentionEngine Engine = ScalarEngine>
class KvCache {
 public:
  using plan_type = Plan;
  using element_type = typename Plan::element_type;
  using Policy = typename Plan::Policy;

  /// @throws ConfigError for options that do not work, alone or with the plan.
  explicit KvCache(Plan plan, const CacheOptions& options = {}, Engine engine = {})
      : plan_{std::move(plan)}, options_{options}, engine_{std::move(engine)} {
    options_.validate();
    const ModelShape& shape = plan_.shape();
    const StorageContext context{shape.head_dim, options_.page_rows, options_.memory};
    layers_.reserve(shape.layers);
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      Layer& added = layers_.emplace_back(Layer{
          {},
          {options_.tail_rows(), shape.kv_heads, shape.head_dim, options_.memory},
          {plan_.observed_queries(layer), options_.tail_rows(), shape.q_heads, shape.head_dim,
           options_.memory}});
      added.heads.reserve(shape.kv_heads);
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        Plan::visit(plan_.at(layer, head), [&]<class P>(const typename P::Config& config) {
          if constexpr (CompressingPolicy<P>) {
            require(options_.max_rollback == 0 || !P::compresses_by_itself(config),
                    "KvCache: KV head ", head, " of layer ", layer,
                    " compresses by itself, which cannot be rolled back; max_rollback is ",
                    options_.max_rollback, ", must be 0");
          }
          added.heads.push_back(Policy{std::in_place_type<P>, config, context});
        });
      }
    }
  }

  KvCache(KvCache&&) noexcept = default;
  KvCache& operator=(KvCache&&) noexcept = default;
  ~KvCache() = default;

  /// An independent cache with the same rows: full pages are shared, open ones copied.
  /// @throws std::bad_alloc
  [[nodiscard]] KvCache fork() const { return KvCache{*this}; }

  /// Attends one layer's queries to everything cached and to their own chunk, causally; then the
  /// chunk joins the cache. The first row of k stands at text position `tokens(layer)`.
  /// @throws ShapeError, CapacityError, std::bad_alloc
  template <class Q, class K, class V, class Out>
  void step(std::size_t layer, const TensorView<Q>& q, const TensorView<K>& k,
            const TensorView<V>& v, const TensorView<Out>& out, const AttendOptions& options = {}) {
    step_any(layer, ConstTensor{q}, ConstTensor{k}, ConstTensor{v}, MutableTensor{out}, options);
  }

  /// The two halves of `step`, for engines that fuse work in between: `append` adds at most
  /// `max_append` rows, `attend` reads with the queries of the latest `q.tokens` of them.
  /// @throws ShapeError, CapacityError, std::bad_alloc
  template <class K, class V>
  void append(std::size_t layer, const TensorView<K>& k, const TensorView<V>& v) {
    append_any(layer, ConstTensor{k}, ConstTensor{v});
  }
  template <class Q, class Out>
  void attend(std::size_t layer, const TensorView<Q>& q, const TensorView<Out>& out,
              const AttendOptions& options = {}) {
    attend_any(layer, ConstTensor{q}, MutableTensor{out}, options);
  }

  /// Takes back the rows from text position `tokens` on, in every layer; also after a step that
  /// failed half-way through the layers.
  /// @throws RollbackError if a layer has committed that far, or has not come that far.
  void truncate(std::size_t tokens) {
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      require<RollbackError>(tokens >= layers_[l].committed && tokens <= layers_[l].tokens,
                             "KvCache::truncate: to ", tokens, " tokens, but layer ", l,
                             " can go back to ", layers_[l].committed, " to ", layers_[l].tokens,
                             " (max_rollback is ", options_.max_rollback, ")");
    }
    for (Layer& layer : layers_) {
      layer.tokens = tokens;
      layer.queries.truncate(tokens);
      for_each_selecting(layer, [&](auto& policy, std::size_t) { policy.undo_refresh(tokens); });
    }
  }

  /// Hands all tentative rows to the policies: from now on they cannot be taken back.
  /// @throws std::bad_alloc
  void commit() {
    for (Layer& layer : layers_) reserve(layer, layer.tokens - layer.committed, layers_);
    for (Layer& layer : layers_) commit_tail(layer, layer.tokens - layer.committed);
    release_spare(layers_);
  }

  /// Commits, then lets every head with a budget drop what its latest queries attend to least.
  /// Heads of other policies stay as they are. If memory runs out, rows are committed, no more.
  /// @throws std::bad_alloc, ShapeError if rows came without their queries (`append` alone).
  void compress() {
    for (const Layer& layer : layers_) check_queries(layer);
    commit();
    compress_layers(layers_);
  }
  /// The same for one layer, for engines that prefill layer by layer.
  void compress(std::size_t layer) {
    Layer& own = layers_[checked(layer)];
    check_queries(own);
    commit_layer(own);
    compress_layers({&own, 1});
  }

  /// Tokens that every layer has seen; `tokens(layer)` differs only inside a step.
  [[nodiscard]] std::size_t tokens() const {
    return std::ranges::min_element(layers_, {}, &Layer::tokens)->tokens;
  }
  [[nodiscard]] std::size_t tokens(std::size_t layer) const { return layers_[checked(layer)].tokens; }
  /// `truncate` goes back no further than this.
  [[nodiscard]] std::size_t commit_point() const {
    return std::ranges::max_element(layers_, {}, &Layer::committed)->committed;
  }

  /// Live bytes of row memory asked of the memory resource; pages shared with forks count in full.
  [[nodiscard]] std::size_t bytes() const {
    std::size_t total = 0;
    for (const Layer& layer : layers_) {
      total += layer.tail.bytes() + layer.queries.bytes();
      for (const Policy& head : layer.heads) {
        total += std::visit([](const auto& policy) { return policy.bytes(); }, head);
      }
    }
    return total;
  }
  /// Of them, bytes that a fork holds too.
  [[nodiscard]] std::size_t shared_bytes() const {
    std::size_t total = 0;
    for (const Layer& layer : layers_) {
      for (const Policy& head : layer.heads) {
        total += std::visit([](const auto& policy) { return policy.shared_bytes(); }, head);
      }
    }
    return total;
  }

  [[nodiscard]] const Plan& plan() const { return plan_; }
  [[nodiscard]] const CacheOptions& options() const { return options_; }
  [[nodiscard]] Engine& engine() { return engine_; }
  [[nodiscard]] const Policy& policy(std::size_t layer, std::size_t head) const {
    require(head < plan_.shape().kv_heads, "KvCache: there is no KV head ", head, ", the shape has ",
            plan_.shape().kv_heads);
    return layers_[checked(layer)].heads[head];
  }

  /// The cached rows that the next query of a head would read, for engines with attention of
  /// their own and for inspection. Valid until the cache next changes.
  [[nodiscard]] SegmentList segments(std::size_t layer, std::size_t head,
                                     Read read = Read::all) const {
    SegmentList list;
    const Policy& own = policy(layer, head);
    const ReadRequest request{static_cast<std::int64_t>(layers_[layer].tokens), 1, read};
    show(layers_[layer], own, head, request, list);
    return list;
  }

 private:
  struct Layer {
    std::vector<Policy> heads;
    Tail<element_type> tail;
    QueryWindow<element_type> queries;
    std::size_t tokens = 0;     // seen
    std::size_t committed = 0;  // of them, handed to the policies; the others lie in the tail
    // How the model's logits are made, as its last call said: a compression observes them alike.
    std::optional<float> scale = {};
    float softcap = 0.0F;
    std::vector<float> sink_logits = {};
  };

  KvCache(const KvCache&) = default;

  [[nodiscard]] std::size_t checked(std::size_t layer) const {
    require<ShapeError>(layer < layers_.size(), "KvCache: there is no layer ", layer,
                        ", the plan has ", layers_.size());
    return layer;
  }

  // ---- what a caller hands in

  template <class Tensor>
  void check(const char* name, const Tensor& tensor, std::size_t tokens, std::size_t heads) const {
    const std::size_t head_dim = plan_.shape().head_dim;
    require<ShapeError>(tensor.tokens == tokens && tensor.heads == heads &&
                            tensor.head_dim == head_dim,
                        "KvCache: ", name, " is [", tensor.tokens, ", ", tensor.heads, ", ",
                        tensor.head_dim, "], must be [", tokens, ", ", heads, ", ", head_dim, "]");
    if (tokens == 0) return;
    require<ShapeError>(tensor.data != nullptr, "KvCache: ", name, " is null");
    require<ShapeError>((heads == 1 || tensor.head_stride >= head_dim) &&
                            (tokens == 1 || tensor.token_stride >= head_dim),
                        "KvCache: ", name, " has a token stride of ", tensor.token_stride,
                        " and a head stride of ", tensor.head_stride,
                        " elements, must be at least head_dim = ", head_dim);
  }

  // Places written twice would hold one of two results.
  static void check_written_once(const MutableTensor& out) {
    if (out.tokens <= 1 || out.heads <= 1) return;
    const std::size_t token = (out.heads - 1) * out.head_stride + out.head_dim;
    const std::size_t head = (out.tokens - 1) * out.token_stride + out.head_dim;
    require<ShapeError>(out.token_stride >= token || out.head_stride >= head,
                        "KvCache: out has a token stride of ", out.token_stride,
                        " and a head stride of ", out.head_stride,
                        " elements, which overlap; one must be at least ", token, " or ", head);
  }

  void check(const AttendOptions& options, std::size_t tokens) const {
    const std::size_t q_heads = plan_.shape().q_heads;
    require<ShapeError>(options.sink_logits.empty() || options.sink_logits.size() == q_heads,
                        "KvCache: sink_logits has ", options.sink_logits.size(),
                        " numbers, must have q_heads = ", q_heads, " or none");
    require<ShapeError>(
        options.log_sum_exp.empty() || options.log_sum_exp.size() == tokens * q_heads,
        "KvCache: log_sum_exp has ", options.log_sum_exp.size(),
        " places, must have tokens x q_heads = ", tokens * q_heads, " or none");
    for (const float logit : options.sink_logits) {
      require<ShapeError>(!std::isnan(logit), "KvCache: a sink logit is NaN, must be a number");
    }
    // Written so that NaN fails.
    require<ShapeError>(options.softcap >= 0.0F && std::isfinite(options.softcap),
                        "KvCache: softcap is ", options.softcap, ", must be 0 or positive");
    require<ShapeError>(!options.scale || std::isfinite(*options.scale), "KvCache: scale is ",
                        options.scale.value_or(0.0F), ", must be finite");
  }

  void check_capacity(const Layer& layer, std::size_t tokens) const {
    require<CapacityError>(options_.max_tokens == 0 || tokens <= options_.max_tokens - layer.tokens,
                           "KvCache: ", tokens, " more tokens after ", layer.tokens,
                           " exceed max_tokens = ", options_.max_tokens);
  }

  // One head of a chunk of keys and values as a segment.
  [[nodiscard]] static Segment chunk_segment(const ConstTensor& k, const ConstTensor& v,
                                             std::size_t head, std::size_t position) {
    const auto plane = [&](const ConstTensor& t) {
      return Plane{.format = {.encoding = t.encoding}, .base = t.row(0, head),
                   .row_stride = t.token_stride * (bits_of(t.encoding) / 8)};
    };
    return {.keys = plane(k), .values = plane(v), .rows = k.tokens,
            .position = static_cast<std::int64_t>(position)};
  }

  // A finite number must stay one in the cache's own element type.
  void check_range(const char* name, const ConstTensor& rows) const {
    if (encoding_of<element_type> == Encoding::float32 ||
        rows.encoding == encoding_of<element_type>) {
      return;
    }
    std::vector<float> row(rows.head_dim);
    for (std::size_t token = 0; token < rows.tokens; ++token) {
      for (std::size_t head = 0; head < rows.heads; ++head) {
        load_dense(rows.encoding, rows.row(token, head), row);
        for (const float number : row) {
          const auto kept = static_cast<float>(element_type{number});
          require<ShapeError>(std::isfinite(kept) || !std::isfinite(number), "KvCache: ", name,
                              " holds ", number, " at token ", token, ", head ", head,
                              ", beyond the largest ", name_of(encoding_of<element_type>),
                              ", in which the cache keeps its rows");
        }
      }
    }
  }

  void check_rows(const Layer& layer, const ConstTensor& k, const ConstTensor& v) const {
    check_range("k", k);
    check_range("v", v);
    for (std::size_t head = 0; head < layer.heads.size() && k.tokens > 0; ++head) {
      std::visit(
          [&](const auto& policy) {
            const Segment rows = chunk_segment(k, v, head, layer.tokens);
            if constexpr (requires { policy.check(rows); }) policy.check(rows);
          },
          layer.heads[head]);
    }
  }

  // ---- the three calls

  void step_any(std::size_t l, const ConstTensor& q, const ConstTensor& k, const ConstTensor& v,
                const MutableTensor& out, const AttendOptions& options) {
    Layer& layer = layers_[checked(l)];
    const ModelShape& shape = plan_.shape();
    const std::size_t tokens = q.tokens;
    check("q", q, tokens, shape.q_heads);
    check("k", k, tokens, shape.kv_heads);
    check("v", v, tokens, shape.kv_heads);
    check("out", out, tokens, shape.q_heads);
    check_written_once(out);
    check(options, tokens);
    check_capacity(layer, tokens);
    if (tokens == 0) return;
    check_rows(layer, k, v);
    const std::size_t uncommitted = layer.tokens - layer.committed + tokens;
    const std::size_t leaving = uncommitted - std::min(uncommitted, options_.max_rollback);
    reserve(layer, leaving, {&layer, 1});
    attend_uncounted(layer, q, out, layer.tokens, options, &k, &v);
    const std::size_t from_tail = std::min(leaving, layer.tokens - layer.committed);
    commit_tail(layer, from_tail);
    commit_chunk(layer, k, v, leaving - from_tail);
    layer.tail.write(k, v, leaving - from_tail, tokens, layer.tokens + leaving - from_tail);
    layer.tokens += tokens;
    finish_call(layer, q, options);
  }

  void append_any(std::size_t l, const ConstTensor& k, const ConstTensor& v) {
    Layer& layer = layers_[checked(l)];
    const std::size_t tokens = k.tokens;
    check("k", k, tokens, plan_.shape().kv_heads);
    check("v", v, tokens, plan_.shape().kv_heads);
    require<CapacityError>(tokens <= options_.max_append, "KvCache::append: ", tokens,
                           " rows, must be at most max_append = ", options_.max_append);
    check_capacity(layer, tokens);
    if (tokens == 0) return;
    check_rows(layer, k, v);
    // The new rows stay in the tail until the next call, so that `attend` finds the policies as
    // they were before them: a window must not have moved on, a row not be quantised yet.
    const std::size_t uncommitted = layer.tokens - layer.committed;
    const std::size_t leaving = uncommitted - std::min(uncommitted, options_.max_rollback);
    reserve(layer, leaving, {&layer, 1});
    commit_tail(layer, leaving);
    layer.tail.write(k, v, 0, tokens, layer.tokens);
    release_spare({&layer, 1});
    layer.tokens += tokens;
  }

  void attend_any(std::size_t l, const ConstTensor& q, const MutableTensor& out,
                  const AttendOptions& options) {
    Layer& layer = layers_[checked(l)];
    check("q", q, q.tokens, plan_.shape().q_heads);
    check("out", out, q.tokens, plan_.shape().q_heads);
    check_written_once(out);
    check(options, q.tokens);
    require<ShapeError>(q.tokens <= layer.tokens - layer.committed, "KvCache::attend: ", q.tokens,
                        " queries, but only the latest ", layer.tokens - layer.committed,
                        " rows have not been committed");
    if (q.tokens == 0) return;
    attend_uncounted(layer, q, out, layer.tokens - q.tokens, options, nullptr, nullptr);
    finish_call(layer, q, options);
  }

  // The attention of a call whose first query stands at `position`, over the chunk too if there is
  // one. Changes nothing if it throws.
  void attend_uncounted(Layer& layer, const ConstTensor& q, const MutableTensor& out,
                        std::size_t position, const AttendOptions& options, const ConstTensor* k,
                        const ConstTensor* v) {
    try {
      layer.sink_logits.reserve(options.sink_logits.size());
      if (options.read == Read::selected) {
        prepare_refresh(layer, q, position + q.tokens, options.refresh);
      }
      run_attention(layer, q, out, position, options, k, v);
    } catch (...) {
      end_refresh(layer, false);
      release_spare({&layer, 1});
      throw;
    }
    end_refresh(layer, true);
    layer.scale = options.scale;
    layer.softcap = options.softcap;
    layer.sink_logits.assign(options.sink_logits.begin(), options.sink_logits.end());
    layer.queries.push(q, position);
  }

  // ---- rows

  // Pages for committing `rows` rows in every head, or none at all: on failure the spare pages of
  // all `reserving` layers go back.
  void reserve(Layer& layer, std::size_t rows, std::span<Layer> reserving) {
    if (rows == 0) return;
    try {
      for (Policy& head : layer.heads) {
        std::visit([&](auto& policy) { policy.reserve(rows); }, head);
      }
    } catch (...) {
      release_spare(reserving);
      throw;
    }
  }

  static void release_spare(std::span<Layer> layers) noexcept {
    for (Layer& layer : layers) {
      for (Policy& head : layer.heads) {
        std::visit([](auto& policy) { policy.release_spare(); }, head);
      }
    }
  }

  void commit_layer(Layer& layer) {
    reserve(layer, layer.tokens - layer.committed, {&layer, 1});
    commit_tail(layer, layer.tokens - layer.committed);
    release_spare({&layer, 1});
  }

  // The first `rows` rows of a chunk go to the policies past the tail.
  void commit_chunk(Layer& layer, const ConstTensor& k, const ConstTensor& v, std::size_t rows) {
    for (std::size_t head = 0; head < layer.heads.size() && rows > 0; ++head) {
      const Segment segment = chunk_segment(k, v, head, layer.tokens).part(0, rows);
      std::visit([&](auto& policy) { policy.commit(segment); }, layer.heads[head]);
    }
    layer.committed += rows;
  }

  // The oldest `rows` rows of the tail go to the policies.
  void commit_tail(Layer& layer, std::size_t rows) {
    for (std::size_t head = 0; head < layer.heads.size() && rows > 0; ++head) {
      layer.tail.for_each_segment(
          head, layer.committed, layer.committed + rows, [&](const Segment& segment) {
            std::visit([&](auto& policy) { policy.commit(segment); }, layer.heads[head]);
          });
    }
    layer.committed += rows;
  }

  // ---- attention

  void show(const Layer& layer, const Policy& head, std::size_t index, const ReadRequest& request,
            SegmentList& list) const {
    std::visit(
        [&](const auto& policy) {
          policy.segments(request, list);
          layer.tail.for_each_segment(
              index, layer.committed, layer.tokens,
              [&](const Segment& rows) { show_uncommitted(policy, rows, request, list); });
        },
        head);
  }

  void run_attention(const Layer& layer, const ConstTensor& q, const MutableTensor& out,
                     std::size_t position, const AttendOptions& options, const ConstTensor* k,
                     const ConstTensor* v) {
    const ReadRequest request{static_cast<std::int64_t>(position), q.tokens, options.read};
    shown_.resize(layer.heads.size());
    heads_.clear();
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      SegmentList& list = shown_[head];
      list.clear();
      show(layer, layer.heads[head], head, request, list);
      if (k != nullptr) {
        std::visit(
            [&](const auto& policy) {
              show_uncommitted(policy, chunk_segment(*k, *v, head, position), request, list);
            },
            layer.heads[head]);
      }
      heads_.emplace_back(list);
    }
    engine_.attend(LayerAttention{q, out, request.first_position, heads_, options});
  }

  template <class Heads, class Act>
  static void for_each_selecting(Heads& layer, Act act) {
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      std::visit(
          [&]<class P>(P& policy) {
            if constexpr (SelectingPolicy<P>) act(policy, head);
          },
          layer.heads[head]);
    }
  }

  // Selecting heads choose by the last query of a call, behind which stand `tokens` tokens.
  void prepare_refresh(Layer& layer, const ConstTensor& q, std::size_t tokens, bool wanted) {
    const std::size_t group = plan_.shape().group();
    const std::size_t head_dim = plan_.shape().head_dim;
    for_each_selecting(layer, [&](auto& policy, std::size_t head) {
      if (!wanted && !policy.selection_is_stale()) return;
      std::vector<float> queries(group * head_dim);
      for (std::size_t i = 0; i < group; ++i) {
        load_dense(q.encoding, q.row(q.tokens - 1, head * group + i),
                   std::span{queries}.subspan(i * head_dim, head_dim));
      }
      policy.prepare_refresh(queries, engine_, tokens);
    });
  }
  static void end_refresh(Layer& layer, bool keep) noexcept {
    for_each_selecting(layer, [&](auto& policy, std::size_t) {
      keep ? policy.finish_refresh() : policy.abandon_refresh();
    });
  }

  // What follows once the rows are kept: it must not fail any more.
  void finish_call(Layer& layer, const ConstTensor& q, const AttendOptions& options) {
    release_spare({&layer, 1});
    // A read of all rows that asks for a refresh chooses for the reads that follow: behind the
    // call, so that its own rows can be chosen.
    if (options.read == Read::all && options.refresh) {
      try {
        prepare_refresh(layer, q, layer.tokens, true);
        end_refresh(layer, true);
      } catch (const std::bad_alloc&) {
        // The next selected read chooses instead.
        end_refresh(layer, false);
        for_each_selecting(layer, [](auto& policy, std::size_t) { policy.forget_selection(); });
      }
    }
    bool due = false;
    for (const Policy& head : layer.heads) {
      std::visit(
          [&]<class P>(const P& policy) {
            if constexpr (CompressingPolicy<P>) {
              due = due || (policy.wants_compress() && knows_queries(layer, policy.observed_queries()));
            }
          },
          head);
    }
    if (!due) return;
    try {
      commit_layer(layer);
      compress_layers({&layer, 1}, /*only_due=*/true);
    } catch (const std::bad_alloc&) {
      // The step itself is done and its rows are kept; the next one tries again.
    }
  }

  // ---- compression

  // Rows that were only appended bring no query.
  [[nodiscard]] static bool knows_queries(const Layer& layer, std::size_t queries) {
    return layer.queries.end() == layer.tokens &&
           layer.queries.size() >= std::min(queries, layer.tokens);
  }

  void check_queries(const Layer& layer) const {
    for (const Policy& head : layer.heads) {
      std::visit(
          [&]<class P>(const P& policy) {
            if constexpr (CompressingPolicy<P>) {
              if (!policy.is_compressible(layer.tokens - layer.committed)) return;
              require<ShapeError>(
                  knows_queries(layer, policy.observed_queries()), "KvCache::compress: of the latest ",
                  std::min(policy.observed_queries(), layer.tokens),
                  " tokens not all queries are known, ", layer.queries.size(), " up to token ",
                  layer.queries.end(), " of ", layer.tokens, "; rows that are only appended bring none");
            }
          },
          head);
    }
  }

  void compress_layers(std::span<Layer> layers, bool only_due = false) {
    const auto each = [&](Layer& layer, auto act) {
      for (std::size_t head = 0; head < layer.heads.size(); ++head) {
        std::visit(
            [&]<class P>(P& policy) {
              if constexpr (CompressingPolicy<P>) {
                if (!only_due || (policy.wants_compress() &&
                                  knows_queries(layer, policy.observed_queries()))) {
                  act(policy, head);
                }
              }
            },
            layer.heads[head]);
      }
    };
    try {
      for (Layer& layer : layers) prepare_compress(layer, each);
    } catch (...) {
      for (Layer& layer : layers) each(layer, [](auto& policy, std::size_t) { policy.abandon_compress(); });
      throw;
    }
    for (Layer& layer : layers) each(layer, [](auto& policy, std::size_t) { policy.finish_compress(); });
  }

  template <class Each>
  void prepare_compress(Layer& layer, Each each) {
    const ModelShape& shape = plan_.shape();
    std::vector<std::vector<float>> sums(layer.heads.size());
    std::vector<std::span<float>> sum_views(layer.heads.size());
    shown_.resize(layer.heads.size());
    heads_.assign(layer.heads.size(), {});
    std::size_t wanted = 0;
    each(layer, [&](auto& policy, std::size_t head) {
      if (!policy.is_compressible()) return;
      wanted = std::max(wanted, policy.observed_queries());
      sums[head].resize(shape.group() * policy.rows());
      sum_views[head] = sums[head];
      shown_[head].clear();
      policy.segments({.first_position = static_cast<std::int64_t>(layer.tokens)}, shown_[head]);
      heads_[head] = shown_[head];
    });
    if (wanted == 0) return;
    // Heads with a smaller window than the layer's largest are observed apart.
    for (std::size_t queries = wanted; queries > 0;) {
      observe(layer, queries, sum_views, each);
      std::size_t next = 0;
      each(layer, [&](auto& policy, std::size_t head) {
        if (!policy.is_compressible()) return;
        const std::size_t own = policy.observed_queries();
        if (own == queries) {
          const std::size_t seen = std::min(queries, layer.queries.end());
          policy.prepare_compress(sums[head], shape.group(), seen);
        }
        if (own < queries) next = std::max(next, own);
      });
      queries = next;
    }
  }

  // Sums of the latest `queries` queries, for the heads that want just so many.
  template <class Each>
  void observe(Layer& layer, std::size_t queries, std::span<const std::span<float>> sums, Each each) {
    const ModelShape& shape = plan_.shape();
    std::vector<element_type> latest(queries * shape.q_heads * shape.head_dim);
    const std::size_t count = layer.queries.copy_latest(queries, latest.data());
    std::vector<std::span<const Segment>> chosen(layer.heads.size());
    each(layer, [&](auto& policy, std::size_t head) {
      if (policy.is_compressible() && policy.observed_queries() == queries) {
        chosen[head] = heads_[head];
      }
    });
    const TensorView<const element_type> view{latest.data(), count, shape.q_heads, shape.head_dim};
    engine_.observe(LayerObservation{ConstTensor{view},
                                     static_cast<std::int64_t>(layer.tokens - count), chosen, sums,
                                     AttendOptions{.scale = layer.scale,
                                                   .softcap = layer.softcap,
                                                   .sink_logits = layer.sink_logits}});
  }

  Plan plan_;
  CacheOptions options_;
  Engine engine_;
  std::vector<Layer> layers_;
  // Scratch of a call.
  std::vector<SegmentList> shown_;
  std::vector<std::span<const Segment>> heads_;
};

}  // namespace kvpolicy
