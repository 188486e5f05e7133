// SPDX-License-Identifier: Apache-2.0
//
// The KV cache of one sequence on a GPU: the interface and the semantics of kvpolicy::KvCache, with
// every call put on a stream. A decode step is one attention launch for all heads of a layer,
// whatever their policies, and one that keeps the new rows; both read the length of the text from
// the device, so a captured step can be replayed while the text grows.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/cache/progress_checks.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/cuda/cached_layers.hpp>
#include <kvpolicy/cuda/commit.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/forks.hpp>
#include <kvpolicy/cuda/inspect.hpp>
#include <kvpolicy/cuda/layer_call.hpp>
#include <kvpolicy/cuda/observation.hpp>
#include <kvpolicy/cuda/options.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy::gpu {

template <Element E>
class HostCopies;
template <Element E>
class Batch;
template <Element E>
class SeatedBatch;
template <Element E>
class SwappedCache;

/// One sequence on a device: the calls of kvpolicy::KvCache, each put on a stream.
/// Shapes: q and out [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim], in device
/// memory, of the plan's element type (float16 or bfloat16), each row aligned to 16 bytes, any token
/// and head stride; keys already rotated to their text position. `out` must not overlap the inputs.
/// The spans of AttendOptions are device memory as well.
///
/// Calls are checked before anything is launched: whatever throws, but for a DeviceError, leaves
/// rows, tokens and bytes as they were. Nothing waits for the device but what says so. Memory is
/// asked for when the text passes what `reserve` made room for, and never otherwise.
///
/// Trees of guesses as kvpolicy::KvCache has them: the last nodes of `AttendOptions::tree`, which is the
/// host's and read during the call, come with the call, at most `max_rollback` nodes in all; `accept`
/// keeps a path. None of it can be part of a graph, for a graph would keep the tree it was captured with.
///
/// A cache that was moved from holds 0 bytes and can be assigned to or destroyed; every call for its
/// rows throws ConfigError.
///
/// Not synchronised: one thread at a time. Calls may come on different streams, and their work is in the order of the
/// calls, as is that of caches that share an engine: a call on another stream than the one before lets its stream wait.
/// What the library does not see is the caller's to order: the tensors of a call, and graphs, whose launches count as
/// no call. The stream of the latest call must live until the next call or until the cache is gone. Memory goes back on
/// it, after the work of forks that shared a page on streams of their own. A cache belongs to the device that was
/// current when it was made.
template <Element E>
class KvCache {
 public:
  using element_type = E;
  using Plan = HeadPlan<E>;
  static_assert(!std::same_as<element_type, float>,
                "gpu::KvCache: the kernels compute with float16 or bfloat16 rows; make the plan over "
                "DenseStorage<float16> or <bfloat16>");

  /// Caches may share an engine, and with it its workspace; then their calls do not overlap on the device.
  /// @throws ConfigError for options that do not work, alone or with the plan; ShapeError for `value_outputs` of
  /// another model; DeviceError without a fitting device, std::bad_alloc
  explicit KvCache(Plan plan, const CacheOptions& options = {}, cudaStream_t stream = nullptr,
                   std::shared_ptr<Engine<element_type>> engine = nullptr)
      : cache_{(refuse_capture(stream, "making a cache"), std::move(plan)), options, stream,
               std::move(engine)} {
    cache_.make_layers(stream);
  }

  /// An independent cache with the same rows: full pages are shared, open ones and windows copied.
  /// With an engine of its own it works beside this one, on another stream.
  /// @throws CaptureError inside a capture, ConfigError for an engine of another shape,
  /// std::bad_alloc, DeviceError
  [[nodiscard]] KvCache fork(cudaStream_t stream = nullptr,
                             std::shared_ptr<Engine<element_type>> engine = nullptr) const {
    return KvCache{CacheForks<E>::fork(cache_, stream, std::move(engine))};
  }

  /// An independent cache with the same tokens under another plan of the same shape, as
  /// kvpolicy::KvCache::fork_as has it: heads that change quantise and summarise their rows as they would
  /// have, heads that stay share full pages. Selecting heads make a new selection. Rows may still be exact here that
  /// the host has quantised, because a device quantises them 64 at a time. A number that a new head cannot
  /// quantise is clamped and counted (`clamped_numbers`). One small launch for each page of a head that changes.
  /// @throws ConfigError if the plan does not fit or is refused on a device, or a head that changes holds not
  /// every row or holds rows quantised, or for an engine of another shape; CaptureError inside a capture,
  /// std::bad_alloc, DeviceError
  [[nodiscard]] KvCache fork_as(Plan plan, cudaStream_t stream = nullptr,
                                std::shared_ptr<Engine<element_type>> engine = nullptr) const {
    return KvCache{CacheForks<E>::fork_as(cache_, std::move(plan), stream, std::move(engine))};
  }

  /// Forgets the text: plan, options and engine stay, and the next row of every layer stands at position
  /// 0 again. All device memory of the cache is allocated again before the old memory goes back on `stream`. Room
  /// that was reserved is lost, and graphs that were captured before must be captured again.
  /// @throws CaptureError inside a capture, std::bad_alloc, DeviceError, with the cache as it was
  void clear(cudaStream_t stream = nullptr) {
    refuse_capture(stream, "clear");
    static_cast<void>(held(cache_.layers));
    cache_.enter(stream);
    KvCache fresh{plan(), options(), stream, engine()};
    *this = std::move(fresh);
  }

  /// Makes room for a text of `tokens`: as long as it grows no further, no call asks for memory.
  /// Graphs that were captured before stay valid. Where some head has keys in halves it is also the room that graphs
  /// need to read with a bound (Read::bounded); a graph reads all rows of a text that has outgrown what was reserved
  /// when it was captured.
  /// @throws CapacityError beyond max_tokens, std::bad_alloc
  void reserve(std::size_t tokens, cudaStream_t stream = nullptr) {
    require<CapacityError>(options().max_tokens == 0 || tokens <= options().max_tokens,
                           "gpu::KvCache::reserve: ", tokens,
                           " tokens, must be at most max_tokens = ", options().max_tokens);
    refuse_capture(stream, "reserve");
    static_cast<void>(held(cache_.layers));
    cache_.enter(stream);
    cache_.make_bound_room(tokens, stream);  // if the rest fails, it is there for the next time
    cache_.grow(0, cache_.layers.size(), tokens, stream);
    cache_.order.mark();  // a graph is captured next
  }
  /// Tokens that there is room for in every layer.
  [[nodiscard]] std::size_t reserved() const {
    return std::ranges::min_element(held(cache_.layers), {}, &Layer::reserved)->reserved;
  }

  /// Attends one layer's queries to everything cached and to their own chunk, causally; then the
  /// chunk joins the cache. Rows are always appended: the first row of k stands at text position
  /// `tokens(layer)`, and a new text begins with `clear`. With a tree, row i stands at `depth` of its node
  /// after the text.
  ///
  /// On a stream that captures, the call is recorded and nothing else: the text grows when the
  /// graph is launched, and `replayed` must say so. A recorded call that refreshes, refreshes each
  /// time.
  /// @throws ShapeError, CapacityError, CaptureError, std::bad_alloc, DeviceError; RollbackError if a tree is pending
  /// that `options` does not name
  template <class Q, class K, class V>
  void step(std::size_t layer, const TensorView<Q>& q, const TensorView<K>& k, const TensorView<V>& v,
            const TensorView<element_type>& out, const AttendOptions& options = {},
            cudaStream_t stream = nullptr) {
    LayerCall<E>{cache_, layer, options, stream}.step(q, k, v, out);
  }

  /// The two halves of `step`, for engines that fuse work in between: `append` adds at most `max_append` rows after
  /// those that are there, `attend` reads with the queries of the latest `q.tokens` of them. Of the options `append`
  /// heeds `tree` alone; `attend` wants the same tree.
  /// @throws as `step`
  template <class K, class V>
  void append(std::size_t layer, const TensorView<K>& k, const TensorView<V>& v, const AttendOptions& options,
              cudaStream_t stream = nullptr) {
    LayerCall<E>{cache_, layer, options, stream}.append(k, v);
  }
  template <class K, class V>
  void append(std::size_t layer, const TensorView<K>& k, const TensorView<V>& v,
              cudaStream_t stream = nullptr) {
    append(layer, k, v, AttendOptions{}, stream);
  }
  template <class Q>
  void attend(std::size_t layer, const TensorView<Q>& q, const TensorView<element_type>& out,
              const AttendOptions& options = {}, cudaStream_t stream = nullptr) {
    LayerCall<E>{cache_, layer, options, stream}.attend(q, out);
  }

  /// Tells the cache that a captured step of `tokens` tokens through all layers is about to be
  /// launched `times` times. Call it first: what it refuses must not be launched. `apart`: it was
  /// captured as `append` and `attend`, after which rows stay tentative until the next call (but not in
  /// a layer with a head that adds up attention, where `attend` commits them).
  /// `refreshes`: it chose chunks, because it was told to or because a head never had. A compression
  /// takes scale, soft cap and sink logits from the latest call that was not captured.
  /// @throws CapacityError if the text would pass what is reserved, RollbackError if a tree is pending
  void replayed(std::size_t times = 1, std::size_t tokens = 1, bool refreshes = false, bool apart = false) {
    check_replay(times, tokens);
    for (Layer& layer : cache_.layers) {
      for (std::size_t i = 0; i < times; ++i) {
        layer.queries.push(layer.tokens, tokens);
        cache_.observed_rows += layer.accumulated_rows(layer.tokens + tokens, /*scores_rows=*/false);
        if (refreshes) {
          layer.note_refresh(0, layer.heads.size(), layer.tokens + tokens, options().max_rollback);
        }
        layer.advance(tokens, apart && !layer.accumulates() ? 0 : tokens, options().max_rollback);
      }
    }
  }

  /// Takes back the rows from text position `tokens` on, in every layer; also after a step that
  /// failed half-way through the layers. The nodes of a tree count as rows after the text: of a
  /// pending tree the first ones stay that fit into `tokens`, pending still.
  /// @throws RollbackError if a layer has committed that far, or has not come that far;
  /// CaptureError inside a capture, DeviceError
  void truncate(std::size_t tokens, cudaStream_t stream = nullptr) {
    check_truncate<Layer>(name, held(cache_.layers), tokens, options().max_rollback);
    refuse_capture(stream, "truncate");
    cache_.enter(stream);
    set_tokens(tokens, tokens, stream);
    for (Layer& layer : cache_.layers) layer.truncate(tokens);
  }

  /// Keeps the nodes of `path` and drops all other nodes of the pending tree, in every layer. `path` leads from
  /// the text downwards; its nodes become tentative rows of the text. An empty path drops the whole tree.
  /// A node's choice of chunks stays if the node and all nodes before it stay.
  /// @throws RollbackError if no tree is pending or a step failed half-way through the layers,
  /// ShapeError if `path` is no path of the tree; CaptureError inside a capture, DeviceError
  void accept(std::span<const std::size_t> path, cudaStream_t stream = nullptr) {
    check_accept<Layer>(name, held(cache_.layers), path);
    refuse_capture(stream, "accept");
    cache_.enter(stream);
    const std::size_t root = cache_.layers.front().text();
    const std::size_t unmoved = unmoved_nodes(path);
    move_path(root, path, unmoved, stream);
    set_tokens(root + path.size(), root + unmoved, stream);
    for (Layer& layer : cache_.layers) layer.accept(path);
  }

  /// Whether rows read otherwise after a commit than before, for some head quantises.
  [[nodiscard]] bool commit_changes_rows() const { return plan().commit_changes_rows(); }
  /// Hands all tentative rows to the policies: from now on they cannot be taken back.
  /// @throws RollbackError if a tree is pending, CaptureError inside a capture, DeviceError
  void commit(cudaStream_t stream = nullptr) {
    cache_.refuse_tree("gpu::KvCache::commit");
    refuse_capture(stream, "commit");
    cache_.enter(stream);
    for (std::size_t l = 0; l < cache_.layers.size(); ++l) commit_layer(cache_, l, stream);
  }

  /// Commits, then lets every head with a budget drop the rows that it ranks lowest.
  /// Heads of other policies stay as they are. Asks for memory, for the survivors of all layers
  /// before any row goes; graphs stay valid. Where heads share a budget, their rows are committed
  /// before the memory is asked for, and the call waits for the stream, because the host must know how
  /// many rows each of them keeps; so does a step after which such heads compress by themselves.
  /// @throws RollbackError if a tree is pending, CaptureError inside a capture, ShapeError if rows came
  /// without their queries, or were in no scoring pass that their scorer needs; std::bad_alloc, DeviceError
  void compress(cudaStream_t stream = nullptr) {
    cache_.refuse_tree("gpu::KvCache::compress");
    const bool in_model = drops_in_model(cache_);
    for (std::size_t l = 0; l < cache_.layers.size(); ++l) {
      cache_.layers[l].check_ranked("compress", l, in_model);
    }
    compress_checked(0, cache_.layers.size(), stream);
  }
  /// The same for one layer: for engines that prefill layer by layer, and where memory is short.
  /// @throws as above; ConfigError if heads of the layer compete with those of other layers (`adaptive_in_model`)
  void compress(std::size_t layer, cudaStream_t stream = nullptr) {
    const Layer& own = cache_.layers[cache_.checked(layer)];
    check_compressed_alone(name, layer, own.shares_in_model());
    own.tree.refuse("gpu::KvCache::compress");
    own.check_ranked("compress", layer, false);
    compress_checked(layer, 1, stream);
  }

  /// Takes over what a scoring pass over a fork has found, as kvpolicy::KvCache::take_scores has it: `scored` was
  /// forked from this cache and has read more since, in calls with `scores_rows`.
  /// @throws ConfigError if `scored` has another plan; ShapeError if it holds fewer tokens, or dropped rows since;
  /// RollbackError if a tree is pending, CaptureError inside a capture, DeviceError
  void take_scores(const KvCache& scored, cudaStream_t stream = nullptr) {
    cache_.refuse_tree("gpu::KvCache::take_scores");
    scored.cache_.refuse_tree("gpu::KvCache::take_scores");
    require(scored.plan() == plan(), name, "::take_scores: the scores are of a cache under another plan");
    refuse_capture(stream, "take_scores");
    CacheForks<E>::check_grew(cache_, scored.cache_);
    CacheForks<E>::take_scores(cache_, scored.cache_, stream);
  }

  /// Tokens that every layer has seen, nodes of a pending tree included; `tokens(layer)` differs only
  /// inside a step.
  [[nodiscard]] std::size_t tokens() const {
    return std::ranges::min_element(held(cache_.layers), {}, &Layer::tokens)->tokens;
  }
  [[nodiscard]] std::size_t tokens(std::size_t layer) const {
    return cache_.layers[cache_.checked(layer)].tokens;
  }
  /// `truncate` goes back no further than this.
  [[nodiscard]] std::size_t commit_point() const {
    return std::ranges::max_element(held(cache_.layers), {}, &Layer::committed)->committed;
  }

  /// Bytes of rows, summaries and kept queries, on the device and in slow memory; pages shared with
  /// forks count in full.
  [[nodiscard]] std::size_t bytes() const {
    std::size_t total = 0;
    for (const Layer& layer : cache_.layers) {
      total += layer.queries.bytes();
      for (const HeadStore& head : layer.heads) total += head.bytes();
    }
    return total;
  }
  /// The part of `bytes()` that is in slow memory.
  [[nodiscard]] std::size_t slow_bytes() const {
    std::size_t total = 0;
    for (const Layer& layer : cache_.layers) {
      for (const HeadStore& head : layer.heads) total += head.slow_bytes();
    }
    return total;
  }
  /// The part of `bytes()` that is in pages which a fork holds too.
  [[nodiscard]] std::size_t shared_bytes() const {
    std::size_t total = 0;
    for (const Layer& layer : cache_.layers) {
      for (const HeadStore& head : layer.heads) total += head.shared_bytes();
    }
    return total;
  }
  /// Device bytes besides: page tables, descriptions, selections, and what `reserve` obtains for reads with a bound in
  /// graphs. The engine's workspace is its own.
  [[nodiscard]] std::size_t overhead_bytes() const {
    std::size_t total = cache_.device.bytes() + cache_.tree.bytes() + cache_.bound_room.bytes();
    for (const Layer& layer : held(cache_.layers)) {
      total += layer.overhead_bytes();
      for (const HeadStore& head : layer.heads) total += head.overhead_bytes();
    }
    return total;
  }

  /// Keys that were read besides those of attention itself, counted as kvpolicy::KvCache does. Forks go on
  /// counting, and so does a cache that is loaded.
  [[nodiscard]] std::size_t observed_rows() const { return cache_.observed_rows; }

  [[nodiscard]] const Plan& plan() const { return cache_.plan; }
  [[nodiscard]] const CacheOptions& options() const { return cache_.options; }
  [[nodiscard]] const std::shared_ptr<Engine<element_type>>& engine() const { return cache_.engine; }

  /// The cached rows that the next query of a head would read, or, with `appended` > 0, that an
  /// `attend` with so many queries would; brought to the host. Of a pending tree all nodes, and of the
  /// text what one right after it would read. Waits for the stream.
  [[nodiscard]] CachedRows rows(std::size_t layer, std::size_t head, Read read = Read::all,
                                std::size_t appended = 0, cudaStream_t stream = nullptr) const {
    refuse_capture(stream, "rows");
    const ModelShape& shape = plan().shape();
    require<ShapeError>(head < shape.kv_heads, "gpu::KvCache: there is no KV head ", head, ", the shape has ",
                        shape.kv_heads);
    const Layer& own = cache_.layers[cache_.checked(layer)];
    const Request request{.queries = static_cast<int>(std::max<std::size_t>(appended, 1)),
                          .own_rows = appended == 0,
                          .selected = read == Read::selected,
                          .upper_half = read == Read::upper_half};
    cache_.enter(stream);
    return download_rows<element_type>(own.heads[head], own.state(), request, own.tree.nodes(),
                                       shape.head_dim, options().page_rows, stream);
  }

  /// How the latest queries attend, of which the cache has kept some (`kept_queries`), at most
  /// `queries`: for each KV head of the layer [group, rows], each row's probability summed over them,
  /// in the order of `rows`. What plans may be chosen by (fastgen.hpp). Returns their number. Waits for
  /// the stream.
  /// @throws ShapeError if rows came without their queries, RollbackError if a tree is pending,
  /// CaptureError inside a capture, std::bad_alloc, DeviceError
  std::size_t observe(std::size_t layer, std::size_t queries, std::vector<std::vector<float>>& sums,
                      cudaStream_t stream = nullptr) const {
    const Layer& own = cache_.layers[cache_.checked(layer)];
    refuse_capture(stream, "observe");
    const std::size_t known = check_observe(name, own, queries);
    cache_.enter(stream);
    sums.resize(own.heads.size());
    download_observation(*engine(), own, cache_.device.heads(layer), cache_.device.counters(layer),
                         options().page_rows, known, options().memory, stream, sums);
    return known;
  }

  /// A layer's heads [kv_heads] and its counters on the device, for launches of the caller's own
  /// (Engine::attend). Valid as long as the cache; what they say changes with every call.
  [[nodiscard]] const HeadView* device_heads(std::size_t layer) const {
    return cache_.device.heads(cache_.checked(layer));
  }
  [[nodiscard]] const LayerState* device_state(std::size_t layer) const {
    return cache_.device.counters(cache_.checked(layer));
  }

  /// The pages of a head's exact rows, as CacheOptions::pool numbers them; empty if they do not come from it.
  /// An engine's own kernels need them for heads over EnginePageStorage: row r of a head that keeps all rows lies
  /// on page r / page_rows. Valid until the next call that changes the cache.
  [[nodiscard]] std::span<const PageId> page_ids(std::size_t layer, std::size_t head) const {
    const std::size_t kv_heads = cache_.plan.shape().kv_heads;
    require<ShapeError>(head < kv_heads, "gpu::KvCache: there is no KV head ", head, ", the shape has ",
                        kv_heads);
    return cache_.layers[cache_.checked(layer)].heads[head].exact().ids();
  }

  /// Numbers that could not be quantised (core/quantizable.hpp) when their rows were: they were
  /// clamped, NaN to 0. kvpolicy::KvCache refuses a call with such a number. Waits for the stream.
  [[nodiscard]] std::size_t clamped_numbers(cudaStream_t stream = nullptr) const {
    refuse_capture(stream, "clamped_numbers");
    static_cast<void>(held(cache_.layers));
    cache_.enter(stream);
    int count = 0;
    check(cudaMemcpyAsync(&count, cache_.device.out_of_range(), sizeof count, cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return static_cast<std::size_t>(count);
  }

 private:
  static constexpr std::string_view name = CachedLayers<E>::name;

  friend class HostCopies<E>;    // cuda/host_copy.hpp
  friend class Batch<E>;         // cuda/batch.hpp
  friend class SeatedBatch<E>;   // cuda/seated_batch.hpp
  friend class SwappedCache<E>;  // cuda/swapped_cache.hpp

  explicit KvCache(CachedLayers<E> cache) : cache_{std::move(cache)} {}

  // What `replayed` refuses.
  void check_replay(std::size_t times, std::size_t tokens) const {
    cache_.refuse_tree("gpu::KvCache::replayed");
    constexpr std::size_t most = std::size_t{1} << 31;
    const std::size_t more = std::min(times, most) * std::min(tokens, most);
    for (std::size_t l = 0; l < cache_.layers.size(); ++l) {
      const Layer& layer = cache_.layers[l];
      require<CapacityError>(layer.tokens + more <= layer.reserved, "gpu::KvCache::replayed: ", more,
                             " more tokens after ", layer.tokens, " exceed the ", layer.reserved,
                             " that layer ", l, " has room for; reserve more first");
    }
  }

  void compress_checked(std::size_t first, std::size_t count, cudaStream_t stream) {
    refuse_capture(stream, "compress");
    cache_.enter(stream);
    compress_layers(cache_, first, count, /*only_due=*/false, stream);
    for (std::size_t l = first; l < first + count; ++l) {
      for (HeadStore& head : cache_.layers[l].heads) head.set_compressed_once();
    }
  }

  // Sets the counters of all layers on the device.
  void set_tokens(std::size_t tokens, std::size_t choices_until, cudaStream_t stream) const {
    cache_.engine->set_states(cache_.device.counters(0), cache_.device.heads(0), cache_.layers.size(),
                              {.tokens = static_cast<int>(tokens), .committed = -1}, choices_until, stream);
  }
  // The rows of a path from its node `first` on, and their queries, join those before.
  void move_path(std::size_t root, std::span<const std::size_t> path, std::size_t first,
                 cudaStream_t stream) const {
    while (first < path.size()) {
      const std::size_t count = std::min<std::size_t>(path.size() - first, PathPart::most);
      PathPart part{.root = static_cast<int>(root),
                    .first = static_cast<int>(first),
                    .count = static_cast<int>(count),
                    .node = {}};
      for (std::size_t i = 0; i < count; ++i) {
        part.node[i] = static_cast<std::uint16_t>(path[first + i]);
      }
      cache_.engine->accept_rows(cache_.device.heads(0), plan().shape().kv_head_count(), options().page_rows,
                                 part, stream);
      for (const Layer& layer : cache_.layers) layer.queries.accept(part, stream);
      first += count;
    }
  }

  CachedLayers<E> cache_;
};

/// `gpu::KvCache cache{plan}`, of any plan.
template <class... T>
KvCache(const HeadPlan<T...>&, const CacheOptions& = {},
        cudaStream_t = nullptr) -> KvCache<typename HeadPlan<T...>::element_type>;
template <class... T>
KvCache(const HeadPlan<T...>&, const CacheOptions&, cudaStream_t,
        std::shared_ptr<Engine<typename HeadPlan<T...>::element_type>>)
    -> KvCache<typename HeadPlan<T...>::element_type>;

}  // namespace kvpolicy::gpu
