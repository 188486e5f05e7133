// SPDX-License-Identifier: Apache-2.0
//
// One call for one layer of a device cache: what it checks, what it launches, in which order. `step`,
// `append` and `attend` of KvCache are such calls.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/core/try.hpp>
#include <kvpolicy/cuda/bounded_call.hpp>
#include <kvpolicy/cuda/cached_layers.hpp>
#include <kvpolicy/cuda/call_checks.hpp>
#include <kvpolicy/cuda/commit.hpp>
#include <kvpolicy/cuda/kernels/call_sequence.cuh>

namespace kvpolicy::gpu {

/// Lives as long as the call. Everything is checked, and all memory obtained, before the first launch.
template <Element E>
class LayerCall {
 public:
  using Rows = TensorView<const E>;
  using Out = TensorView<E>;

  LayerCall(CachedLayers<E>& cache, std::size_t layer, const AttendOptions& options, cudaStream_t stream)
      : cache_{&cache},
        l_{cache.checked(layer)},
        layer_{&cache.layers[l_]},
        options_{&options},
        stream_{stream},
        capturing_{is_capturing(stream)} {}

  void step(const Rows& q, const Rows& k, const Rows& v, const Out& out) {
    if (begin_step(q, k, v, out)) run(k, v, out);
  }

  // ---- a step in parts, whose launches may serve many sequences (batch.hpp)

  /// Checks a step and obtains its memory; whether there is anything to do. @throws as KvCache::step
  [[nodiscard]] bool begin_step(const Rows& q, const Rows& k, const Rows& v, const Out& out) {
    const ModelShape& shape = cache_->plan.shape();
    check_rows("q", q, q.tokens, shape.q_heads, shape.head_dim);
    check_rows("k", k, q.tokens, shape.kv_heads, shape.head_dim);
    check_rows("v", v, q.tokens, shape.kv_heads, shape.head_dim);
    check_attending(q, out);
    refuse_staging();
    check_growth("step", q.tokens);
    next_ = prepare_tree(q.tokens);
    cache_->make_room(l_, q.tokens, capturing_, stream_);
    q_ = q;
    own_rows_ = true;
    return q.tokens > 0;
  }
  /// The rest of the step, by launches of its own. @throws DeviceError
  void run(const Rows& k, const Rows& v, const Out& out) {
    describe();
    attend_layer(&k, &v, out);
    note_attention(&k);
    write_rows(*cache_, l_, &k, &v, q_.tokens, q_.tokens, stream_);
    end_step();
  }
  /// Whether the step cannot be part of a launch that serves others: rows are staged, or chosen by their bounds, for
  /// one sequence at a time.
  [[nodiscard]] bool is_alone() const {
    return cache_->options.has_slow_memory() || cache_->options.launches != Launches::joint ||
           options_->read == Read::bounded;
  }
  /// Copies the rows that the call reads to the device and lets heads choose their chunks. @throws DeviceError
  void describe() {
    fetch_rows();
    request_ = {.queries = static_cast<int>(q_.tokens),
                .own_rows = own_rows_,
                .selected = reads_selected(),
                .upper_half = options_->read == Read::upper_half,
                .tree = write_tree(next_, q_.tokens)};
    if (request_.selected) {
      // A recorded refresh_selection is one of all heads, for that is what `replayed` takes it for.
      const bool all = options_->refresh_selection || (capturing_ && layer_->is_stale());
      layer_->for_each_stale(all, [&](std::size_t first, std::size_t count) {
        refresh(first, count, q_, own_rows_ ? q_.tokens : 0);
      });
    }
    heads_ = near_heads(request_);
  }
  /// What a launch that serves many sequences must know of this one; `first`: where its tokens begin.
  [[nodiscard]] CallSequence told(std::size_t first) const {
    return {.read_heads = heads_,
            .heads = cache_->device.heads(l_),
            .state = cache_->device.counters(l_),
            .out_of_range = cache_->device.out_of_range(),
            .query_ring = layer_->queries.numbers(),
            .log_sum_exp = options_->log_sum_exp.empty() ? nullptr : options_->log_sum_exp.data(),
            .tree = request_.tree,
            .query_slots = static_cast<int>(layer_->queries.slots()),
            .first = static_cast<int>(first),
            .tokens = request_.queries,
            .max_rollback = static_cast<int>(cache_->options.max_rollback),
            .selected = request_.selected,
            .upper_half = request_.upper_half};
  }
  /// What heads keep of a call besides its rows; `keeps_queries`: the launch that keeps the rows does not keep the
  /// queries. @throws DeviceError
  void note_attention(const Rows* k, bool keeps_queries = true) {
    if (layer_->adds_up(options_->scores_rows)) {
      accumulate(k);
      if (!capturing_) {
        cache_->observed_rows +=
            layer_->accumulated_rows(layer_->tokens + (own_rows_ ? q_.tokens : 0), options_->scores_rows);
      }
    }
    if (keeps_queries) {
      layer_->queries.copy(cache_->device.counters(l_), request_, tensor_of(q_), stream_);
    }
    if (!capturing_) layer_->remember_logits(*options_, stream_);
  }
  /// After the rows were written: the host's counters move on, and heads compress that are due.
  void end_step() {
    if (!capturing_) {
      layer_->queries.push(layer_->tokens, q_.tokens);
      layer_->advance(q_.tokens, q_.tokens, cache_->options.max_rollback);
      if (options_->tree != nullptr) layer_->tree.keep(*options_->tree);
      if (options_->scores_rows) layer_->note_scored();
    }
    finish(q_);
  }
  [[nodiscard]] int page_rows() const { return static_cast<int>(cache_->options.page_rows); }
  [[nodiscard]] const Layer& layer() const { return *layer_; }
  [[nodiscard]] std::size_t longest_read() const { return layer_->longest_read(request_); }

  void append(const Rows& k, const Rows& v) {
    const ModelShape& shape = cache_->plan.shape();
    check_rows("k", k, k.tokens, shape.kv_heads, shape.head_dim);
    check_rows("v", v, k.tokens, shape.kv_heads, shape.head_dim);
    check_append(cache_->name, k.tokens, cache_->options.max_append);
    note_stream();
    check_growth("append", k.tokens);
    cache_->make_room(l_, k.tokens, capturing_, stream_);
    if (k.tokens == 0) return;
    // The new rows stay tentative until the next call, so that `attend` finds every head as it was
    // before them: a row must not be quantised yet.
    write_rows(*cache_, l_, &k, &v, k.tokens, 0, stream_);
    if (!capturing_) layer_->advance(k.tokens, 0, cache_->options.max_rollback);
    if (options_->tree != nullptr) layer_->tree.keep(*options_->tree);
  }

  void attend(const Rows& q, const Out& out) {
    check_rows("q", q, q.tokens, cache_->plan.shape().q_heads, cache_->plan.shape().head_dim);
    check_attending(q, out);
    // While a graph is captured, the `append` before this call was only recorded.
    require<ShapeError>(
        capturing_ ? q.tokens <= cache_->options.tail_rows() : q.tokens <= layer_->uncommitted(),
        "gpu::KvCache::attend: ", q.tokens, " queries, but only the latest ", layer_->uncommitted(),
        " rows have not been committed");
    refuse_staging();
    if (options_->tree == nullptr) {
      layer_->tree.refuse("gpu::KvCache::attend");
    } else {
      refuse_captured_tree();
      layer_->tree.check_is(*options_->tree, q.tokens);
    }
    if (q.tokens == 0) return;
    next_ = prepare_tree(q.tokens);
    q_ = q;
    describe();
    attend_layer(nullptr, nullptr, out);
    note_attention(nullptr);
    if (!capturing_) layer_->queries.push(layer_->tokens - q.tokens, q.tokens);
    // What is added up cannot be taken back, so the rows that it belongs to may not be either.
    if (layer_->accumulates()) {
      write_commit(*cache_, l_, stream_);
      if (!capturing_) layer_->advance(0, 0, 0);
    }
    if (options_->scores_rows) layer_->note_scored();
    finish(q);
  }

 private:
  [[nodiscard]] bool reads_selected() const { return options_->read == Read::selected; }
  void note_stream() const { cache_->enter(stream_); }
  // The rest of what `step` and `attend` check alike.
  void check_attending(const Rows& q, const Out& out) const {
    const ModelShape& shape = cache_->plan.shape();
    check_rows("out", Rows{out}, q.tokens, shape.q_heads, shape.head_dim);
    check_written_once(MutableTensor{out});
    check_spans(*options_, q.tokens, shape.q_heads, shape.kv_heads);
    // `replayed` takes it that a call chooses by its last query.
    require<CaptureError>(!capturing_ || options_->selection_query.value_or(q.tokens - 1) + 1 == q.tokens,
                          "gpu::KvCache: selection_query is ", options_->selection_query.value_or(0),
                          ", in a graph only the last of a call's ", q.tokens, " queries chooses");
    note_stream();
    check_bound(q.tokens);
    require<CaptureError>(!capturing_ || !layer_->compresses_by_itself(), "gpu::KvCache: layer ", l_,
                          " compresses by itself, for which it asks for memory: not in a graph");
    // The host knows which rows were scored, and not how often a graph is launched.
    require<CaptureError>(
        !capturing_ || !options_->scores_rows || !layer_->waits_for_scoring(), "gpu::KvCache: layer ", l_,
        " has heads that wait for scoring passes, whose calls (scores_rows) cannot be part of "
        "a graph");
  }

  void check_bound(std::size_t queries) const {
    if (options_->read != Read::bounded) return;
    const BoundRoom& room = cache_->bound_room;
    const std::size_t columns = queries * cache_->plan.shape().queries_per_kv();
    const bool needs_memory =
        BoundedCall<E>::needs_memory(options_->bound, static_cast<int>(columns), layer_->has_halves());
    require<CaptureError>(!capturing_ || !needs_memory || room.rows() >= layer_->tokens,
                          "gpu::KvCache: Read::bounded of ", layer_->tokens,
                          " tokens needs memory that a graph cannot ask for, and there is room for ",
                          room.rows(), "; reserve first");
    require(
        !cache_->options.has_slow_memory(),
        "gpu::KvCache: Read::bounded chooses among rows on the device, and this cache has slow_memory; read "
        "all or selected");
    require(options_->bound.certainty != Certainty::four_sigma, "gpu::KvCache: bound.certainty is '",
            names_of(Certainty{})[static_cast<std::size_t>(Certainty::four_sigma)],
            "', which is estimated on the host; a device has 'sure' and 'none'");
  }

  // How a call's logits come about, and what it brings.
  [[nodiscard]] AttendParams params(const Rows* k) const {
    AttendParams made{.heads = heads_,
                      .states = cache_->device.counters(l_),
                      .kv_heads = static_cast<int>(layer_->heads.size()),
                      .group = static_cast<int>(cache_->plan.shape().queries_per_kv()),
                      .page_rows = static_cast<int>(cache_->options.page_rows),
                      .request = request_,
                      .q = tensor_of(q_)};
    if (k != nullptr) made.k = tensor_of(*k);
    set_logits(made, *options_, q_.head_dim);
    return made;
  }
  void attend_layer(const Rows* k, const Rows* v, const Out& out) {
    AttendParams call = params(k);
    call.out = tensor_of(Rows{out});
    if (v != nullptr) call.v = tensor_of(*v);
    call.log_sum_exp = options_->log_sum_exp.empty() ? nullptr : options_->log_sum_exp.data();
    const std::size_t longest = longest_read();
    if (options_->read == Read::bounded) {
      const BoundRoom& room = cache_->bound_room;
      const std::size_t rows = capturing_ ? room.rows() : layer_->tokens;
      BoundedCall<E> bounded{*cache_->engine, call, options_->bound, rows, layer_->has_halves()};
      if (capturing_) {
        bounded.use(room.get());
      } else {
        bounded.prepare(cache_->options.memory, stream_);
      }
      return bounded.run(layer_->packs(), longest, stream_);
    }
    if (cache_->options.launches == Launches::joint) {
      cache_->engine->attend(call, layer_->packs(), longest, stream_);
    } else {
      layer_->for_each_kind([&](std::size_t first, std::size_t count, bool packs) {
        cache_->engine->attend(heads_of(call, first, count), packs, longest, stream_);
      });
    }
  }

  // Adds what a call's queries pay to the sums of heads that rank their rows by it. The rows are those
  // that the call has just read.
  void accumulate(const Rows* k) const {
    const AttendParams call = params(k);
    const auto memory = cache_->engine->accumulation_memory();
    cache_->engine->add_columns({.observed = {.heads = call.heads,
                                              .state = call.states,
                                              .accumulates = true,
                                              .scores_rows = options_->scores_rows,
                                              .kv_heads = call.kv_heads,
                                              .group = call.group,
                                              .page_rows = call.page_rows,
                                              .request = call.request,
                                              .q = call.q,
                                              .k = call.k,
                                              .attention_sink_bias = call.attention_sink_bias,
                                              .scale_log2 = call.scale_log2,
                                              .softcap = call.softcap,
                                              .partial = memory.partial,
                                              .tickets = memory.tickets,
                                              .log_sum_exp = memory.log_sum_exp}},
                                call.request.queries, layer_->packs(), stream_);
  }

  void finish(const Rows& q) {
    // A read of all rows, or of those that can matter, that asks for a refresh chooses for the reads that follow: after
    // the call has attended, so that its own rows can be chosen.
    const bool reads_all = options_->read == Read::all || options_->read == Read::bounded;
    if (reads_all && options_->refresh_selection && layer_->selects()) {
      refresh(0, layer_->heads.size(), q, 0);
    }
    if (capturing_ || !layer_->wants_compress()) return;
    KVPOLICY_TRY {
      commit_layer(*cache_, l_, stream_);
      compress_layers(*cache_, l_, 1, /*only_due=*/true, stream_);
    }
    KVPOLICY_CATCH(const std::bad_alloc&) {
      // The step itself is done and its rows are kept; the next one tries again.
    }
  }

  // Lets those of the heads [first, first + count) that select choose their chunks by one of the call's queries.
  // `own_rows`: rows of the call that the counters do not include yet.
  void refresh(std::size_t first, std::size_t count, const Rows& q, std::size_t own_rows) {
    const std::size_t queries = options_->selection_query.value_or(q.tokens - 1) + 1;
    const std::size_t later = q.tokens - queries;  // rows after the query that chooses
    Tensor rows = tensor_of(q);
    rows.data +=
        static_cast<long long>(first * cache_->plan.shape().queries_per_kv() * q.head_stride * sizeof(E));
    cache_->engine->refresh(cache_->device.heads(l_) + first, cache_->device.counters(l_), count, rows,
                            static_cast<int>(queries), static_cast<int>(own_rows) - static_cast<int>(later),
                            cache_->options.page_rows, stream_, layer_->own_summaries);
    if (capturing_) return;
    layer_->note_refresh(first, count, layer_->tokens + own_rows - later, cache_->options.max_rollback);
  }

  // ---- trees

  void refuse_captured_tree() const {
    require<CaptureError>(!capturing_,
                          "gpu::KvCache: a tree of guesses cannot be part of a graph, but "
                          "the stream captures");
  }
  // `tokens` tokens are about to be added. After this check the layer can note the tree without failing.
  void check_growth(const char* call, std::size_t tokens) {
    const TokenTree* tree = options_->tree;
    if (tree == nullptr) return layer_->tree.refuse("gpu::KvCache::", call);
    refuse_captured_tree();
    layer_->tree.check_grows_to(*tree, tokens, cache_->options.max_rollback);
    layer_->tree.prepare(*tree, layer_->text());
  }
  // A chain is read like any chunk, which needs no mask.
  [[nodiscard]] bool branches() const {
    const TokenTree* tree = options_->tree;
    return tree != nullptr && !tree->empty() && tree->depth(tree->size() - 1) + 1 < tree->size();
  }
  [[nodiscard]] DeviceTree::Next prepare_tree(std::size_t queries) const {
    return branches() && queries > 0 ? cache_->tree.prepare(*options_->tree, queries, stream_)
                                     : DeviceTree::Next{};
  }
  // What the kernels are told of the tree that is prepared in `next`.
  [[nodiscard]] CallTree write_tree(DeviceTree::Next& next, std::size_t queries) {
    if (!branches()) return {};
    cache_->tree.write(next, queries, stream_);
    return cache_->tree.view();
  }

  // ---- rows in slow memory

  void refuse_staging() const {
    require<CaptureError>(!capturing_ || !layer_->stages(reads_selected()), "gpu::KvCache: layer ", l_,
                          " has heads in slow memory that read all their "
                          "rows, which are brought page by page as the text grows: not in a graph");
  }
  // Before anything is launched: the layer's rows, if they are not there or on the way, and the next
  // layer's, so that they come while this one is attended.
  void fetch_rows() {
    if (!layer_->stages(reads_selected())) return;
    Staging& staging = cache_->engine->staging();
    const StagedLayer now = layer_->staged(reads_selected());
    staging.fetch(now, 0, stream_);
    const Layer& next = cache_->layers[(l_ + 1) % cache_->layers.size()];
    if (&next != layer_ && next.stages(reads_selected())) {
      staging.fetch(next.staged(reads_selected()), now.id, stream_);
    }
  }
  // The heads of a layer with all that a call reads on the device.
  [[nodiscard]] const HeadView* near_heads(const Request& request) {
    const DeviceState& device = cache_->device;
    const std::size_t page_rows = cache_->options.page_rows;
    if (request.selected && layer_->gathers()) {
      cache_->engine->gather(device.heads(l_), device.counters(l_), page_rows, stream_);
    }
    const HeadView* heads = request.selected ? device.selected_heads(l_) : device.heads(l_);
    if (!layer_->stages(request.selected)) return heads;
    std::byte* rows = cache_->engine->staging().rows_of(layer_->stage_id(), stream_);
    return cache_->engine->describe_staged(heads, device.counters(l_), request.selected, rows, page_rows,
                                           stream_);
  }

  CachedLayers<E>* cache_;
  std::size_t l_;
  Layer* layer_;
  const AttendOptions* options_;
  cudaStream_t stream_;
  bool capturing_;
  // The state of a call that has begun.
  DeviceTree::Next next_ = {};
  Rows q_ = {};
  bool own_rows_ = false;
  Request request_ = {};
  const HeadView* heads_ = nullptr;  // as the call reads them
};

}  // namespace kvpolicy::gpu
