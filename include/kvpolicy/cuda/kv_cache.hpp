// SPDX-License-Identifier: Apache-2.0
//
// The KV cache of one sequence on a GPU: the interface and the semantics of kvpolicy::KvCache, with
// every call put on a stream. A decode step is one attention launch for all heads of a layer,
// whatever their policies, and one that keeps the new rows; both read the length of the text from
// the device, so a captured step can be replayed while the text grows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/cache/plan_checks.hpp>
#include <kvpolicy/cache/progress_checks.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/cuda/call_checks.hpp>
#include <kvpolicy/cuda/compression.hpp>
#include <kvpolicy/cuda/device_state.hpp>
#include <kvpolicy/cuda/device_tree.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/forks.hpp>
#include <kvpolicy/cuda/inspect.hpp>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/observation.hpp>
#include <kvpolicy/cuda/options.hpp>
#include <kvpolicy/cuda/served_rule.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy::cuda {

template <Element E>
class HostCopies;

/// One sequence on a device: the calls of kvpolicy::KvCache, each put on a stream.
/// Shapes: q and out [tokens, q_heads, head_dim], k and v [tokens, kv_heads, head_dim], in device
/// memory, of the plan's element type (half or bfloat16), each row aligned to 16 bytes, any token
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
/// Not synchronised, and meant for one stream at a time: to go on with another, let that stream
/// wait for this one. The same holds between caches that share an engine. Memory goes back on the
/// stream of the latest call (no capture counts as one), which must live as long as the cache; let it
/// wait before the cache goes, for graphs launched elsewhere and for forks used elsewhere. A cache
/// belongs to the device that was current when it was made.
template <Element E>
class KvCache {
 public:
  using element_type = E;
  using Plan = HeadPlan<E>;
  static_assert(!std::same_as<element_type, float>,
                "cuda::KvCache: the kernels compute with half or bfloat16 rows; make the plan over "
                "DenseStorage<half> or <bfloat16>");

  /// Caches may share an engine, and with it its workspace, if they are used on one stream.
  /// @throws ConfigError for options that do not work, alone or with the plan, DeviceError without
  /// a fitting device, std::bad_alloc
  explicit KvCache(Plan plan, const CacheOptions& options = {}, cudaStream_t stream = nullptr,
                   std::shared_ptr<Engine<element_type>> engine = nullptr)
      : plan_{std::move(plan)}, options_{options}, engine_{std::move(engine)}, latest_{stream} {
    options_.validate();
    if (engine_ == nullptr) {
      engine_ = std::make_shared<Engine<element_type>>(plan_.shape(), options_.memory, stream);
    }
    require_own_shape();
    refuse_capture(stream, "making a cache");
    make_layers(stream);
  }

  KvCache(KvCache&&) noexcept = default;
  KvCache& operator=(KvCache&& other) noexcept {
    if (this == &other) return *this;
    give_back();
    plan_ = std::move(other.plan_);
    options_ = other.options_;
    engine_ = std::move(other.engine_);
    device_ = std::move(other.device_);
    layers_ = std::move(other.layers_);
    tree_ = std::move(other.tree_);
    latest_ = other.latest_;
    return *this;
  }
  ~KvCache() { give_back(); }

  /// An independent cache with the same rows: full pages are shared, open ones and windows copied.
  /// With an engine of its own it can be used on another stream.
  /// @throws CapacityError inside a capture, ConfigError for an engine of another shape,
  /// std::bad_alloc, DeviceError
  [[nodiscard]] KvCache fork(cudaStream_t stream = nullptr,
                             std::shared_ptr<Engine<element_type>> engine = nullptr) const {
    return CacheForks<E>::fork(*this, stream, std::move(engine));
  }

  /// An independent cache with the same tokens under another plan of the same shape, as
  /// kvpolicy::KvCache::fork_as has it: heads that change quantise and summarise their rows as they would
  /// have, heads that stay share full pages. Selecting heads choose anew. Rows may still be exact here that
  /// the host has quantised, because a device quantises them 64 at a time. A number that a new head cannot
  /// quantise is clamped and counted (`clamped_numbers`). One small launch for each page of a head that changes.
  /// @throws ConfigError if the plan does not fit or is refused on a device, or a head that changes holds not
  /// every row or holds rows quantised, or for an engine of another shape; CapacityError inside a capture,
  /// std::bad_alloc, DeviceError
  [[nodiscard]] KvCache fork_as(Plan plan, cudaStream_t stream = nullptr,
                                std::shared_ptr<Engine<element_type>> engine = nullptr) const {
    return CacheForks<E>::fork_as(*this, std::move(plan), stream, std::move(engine));
  }

  /// Forgets the text: plan, options and engine stay, and the next row of every layer stands at position
  /// 0 again. All device memory of the cache is asked for anew, before the old goes back on `stream`; room
  /// that was reserved goes, too, and graphs that were captured before must be captured again.
  /// @throws CapacityError inside a capture, std::bad_alloc, DeviceError, with the cache as it was
  void clear(cudaStream_t stream = nullptr) {
    refuse_capture(stream, "clear");
    static_cast<void>(held(layers_));
    KvCache fresh{plan_, options_, stream, engine_};
    latest_ = stream;
    *this = std::move(fresh);
  }

  /// Makes room for a text of `tokens`: as long as it grows no further, no call asks for memory.
  /// Graphs that were captured before stay valid.
  /// @throws CapacityError beyond max_tokens, std::bad_alloc
  void reserve(std::size_t tokens, cudaStream_t stream = nullptr) {
    require<CapacityError>(options_.max_tokens == 0 || tokens <= options_.max_tokens,
                           "cuda::KvCache::reserve: ", tokens, " tokens, must be at most max_tokens = ",
                           options_.max_tokens);
    refuse_capture(stream, "reserve");
    static_cast<void>(held(layers_));
    latest_ = stream;
    grow(0, layers_.size(), tokens, stream);
  }
  /// Tokens that there is room for in every layer.
  [[nodiscard]] std::size_t reserved() const {
    return std::ranges::min_element(held(layers_), {}, &Layer::reserved)->reserved;
  }

  /// Attends one layer's queries to everything cached and to their own chunk, causally; then the
  /// chunk joins the cache. Rows are always appended: the first row of k stands at text position
  /// `tokens(layer)`, and a new text begins with `clear`. With a tree, row i stands at `depth` of its node
  /// behind the text.
  ///
  /// On a stream that captures, the call is recorded and nothing else: the text grows when the
  /// graph is launched, and `replayed` must say so. A recorded call that refreshes, refreshes each
  /// time.
  /// @throws ShapeError, CapacityError, std::bad_alloc, DeviceError; RollbackError if a tree is pending
  /// that `options` does not name
  template <class Q, class K, class V>
  void step(std::size_t layer, const TensorView<Q>& q, const TensorView<K>& k,
            const TensorView<V>& v, const TensorView<element_type>& out,
            const AttendOptions& options = {}, cudaStream_t stream = nullptr) {
    step_checked(layer, q, k, v, out, options, stream);
  }

  /// The two halves of `step`, for engines that fuse work in between: `append` adds at most
  /// `max_append` rows after those that are there, `attend` reads with the queries of the latest `q.tokens` of them. Of the
  /// options `append` heeds `tree` alone; `attend` wants the same tree.
  /// @throws as `step`
  template <class K, class V>
  void append(std::size_t layer, const TensorView<K>& k, const TensorView<V>& v,
              const AttendOptions& options, cudaStream_t stream = nullptr) {
    append_checked(layer, k, v, options.tree, stream);
  }
  template <class K, class V>
  void append(std::size_t layer, const TensorView<K>& k, const TensorView<V>& v,
              cudaStream_t stream = nullptr) {
    append_checked(layer, k, v, nullptr, stream);
  }
  template <class Q>
  void attend(std::size_t layer, const TensorView<Q>& q, const TensorView<element_type>& out,
              const AttendOptions& options = {}, cudaStream_t stream = nullptr) {
    attend_checked(layer, q, out, options, stream);
  }

  /// Tells the cache that a captured step of `tokens` tokens through all layers is about to be
  /// launched `times` times. Call it first: what it refuses must not be launched. `apart`: it was
  /// captured as `append` and `attend`, behind which rows stay tentative until the next call (but not in
  /// a layer with a head that adds up attention, where `attend` commits them).
  /// `refreshes`: it chose chunks, because it was told to or because a head never had. A compression
  /// takes scale, soft cap and sink logits from the latest call that was not captured.
  /// @throws CapacityError if the text would pass what is reserved, RollbackError if a tree is pending
  void replayed(std::size_t times = 1, std::size_t tokens = 1, bool refreshes = false,
                bool apart = false) {
    refuse_tree("replayed");
    constexpr std::size_t most = std::size_t{1} << 31;
    const std::size_t more = std::min(times, most) * std::min(tokens, most);
    for (std::size_t l = 0; l < layers_.size(); ++l) {
      const Layer& layer = layers_[l];
      require<CapacityError>(layer.tokens + more <= layer.reserved, "cuda::KvCache::replayed: ", more,
                             " more tokens after ", layer.tokens, " exceed the ", layer.reserved,
                             " that layer ", l, " has room for; reserve more first");
    }
    for (Layer& layer : layers_) {
      for (std::size_t i = 0; i < times; ++i) {
        layer.queries.push(layer.tokens, tokens);
        if (refreshes) {
          layer.note_refresh(0, layer.heads.size(), layer.tokens + tokens, options_.max_rollback);
        }
        layer.advance(tokens, apart && !layer.accumulates() ? 0 : tokens, options_.max_rollback);
      }
    }
  }

  /// Takes back the rows from text position `tokens` on, in every layer; also after a step that
  /// failed half-way through the layers. The nodes of a tree count as rows behind the text: of a
  /// pending tree the first ones stay that fit into `tokens`, pending still.
  /// @throws RollbackError if a layer has committed that far, or has not come that far;
  /// CapacityError inside a capture, DeviceError
  void truncate(std::size_t tokens, cudaStream_t stream = nullptr) {
    check_truncate<Layer>(name, held(layers_), tokens, options_.max_rollback);
    refuse_capture(stream, "truncate");
    latest_ = stream;
    set_tokens(tokens, tokens, stream);
    for (Layer& layer : layers_) layer.truncate(tokens);
  }

  /// Of the pending tree keeps the nodes of `path`, which leads from the text downwards, as tentative
  /// rows of the text, in every layer; none, if it is empty. A node's choice of chunks stays if the
  /// node and all before it do.
  /// @throws RollbackError if no tree is pending or a step failed half-way through the layers,
  /// ShapeError if `path` is no path of the tree; CapacityError inside a capture, DeviceError
  void accept(std::span<const std::size_t> path, cudaStream_t stream = nullptr) {
    check_accept<Layer>(name, held(layers_), path);
    refuse_capture(stream, "accept");
    latest_ = stream;
    const std::size_t root = layers_.front().text();
    const std::size_t unmoved = unmoved_nodes(path);
    move_path(root, path, unmoved, stream);
    set_tokens(root + path.size(), root + unmoved, stream);
    for (Layer& layer : layers_) layer.accept(path);
  }

  /// Whether rows read otherwise after a commit than before, for some head quantises.
  [[nodiscard]] bool commit_changes_rows() const { return plan_.commit_changes_rows(); }
  /// Hands all tentative rows to the policies: from now on they cannot be taken back.
  /// @throws RollbackError if a tree is pending, CapacityError inside a capture, DeviceError
  void commit(cudaStream_t stream = nullptr) {
    refuse_tree("commit");
    refuse_capture(stream, "commit");
    latest_ = stream;
    for (std::size_t l = 0; l < layers_.size(); ++l) commit_layer(l, stream);
  }

  /// Commits, then lets every head with a budget drop the rows that it ranks lowest.
  /// Heads of other policies stay as they are. Asks for memory, for the survivors of all layers
  /// before any row goes; graphs stay valid. Where heads share a layer's budget, their rows are committed
  /// before the memory is asked for, and the call waits for the stream, because the host must know how
  /// many rows each of them keeps; so does a step after which such heads compress by themselves.
  /// @throws RollbackError if a tree is pending, CapacityError inside a capture, ShapeError if rows came
  /// without their queries, std::bad_alloc, DeviceError
  void compress(cudaStream_t stream = nullptr) {
    refuse_tree("compress");
    for (const Layer& layer : layers_) layer.check_queries("compress");
    compress_checked(0, layers_.size(), stream);
  }
  /// The same for one layer: for engines that prefill layer by layer, and where memory is short.
  void compress(std::size_t layer, cudaStream_t stream = nullptr) {
    layers_[checked(layer)].tree.refuse("compress");
    layers_[layer].check_queries("compress");
    compress_checked(layer, 1, stream);
  }

  /// Tokens that every layer has seen, nodes of a pending tree included; `tokens(layer)` differs only
  /// inside a step.
  [[nodiscard]] std::size_t tokens() const {
    return std::ranges::min_element(held(layers_), {}, &Layer::tokens)->tokens;
  }
  [[nodiscard]] std::size_t tokens(std::size_t layer) const { return layers_[checked(layer)].tokens; }
  /// `truncate` goes back no further than this.
  [[nodiscard]] std::size_t commit_point() const {
    return std::ranges::max_element(held(layers_), {}, &Layer::committed)->committed;
  }

  /// Bytes of rows, summaries and kept queries, on the device and in slow memory; pages shared with
  /// forks count in full.
  [[nodiscard]] std::size_t bytes() const {
    std::size_t total = 0;
    for (const Layer& layer : layers_) {
      total += layer.queries.bytes();
      for (const HeadStore& head : layer.heads) total += head.bytes();
    }
    return total;
  }
  /// Of them, bytes in slow memory.
  [[nodiscard]] std::size_t slow_bytes() const {
    std::size_t total = 0;
    for (const Layer& layer : layers_) {
      for (const HeadStore& head : layer.heads) total += head.slow_bytes();
    }
    return total;
  }
  /// Of all bytes, those that a fork holds too.
  [[nodiscard]] std::size_t shared_bytes() const {
    std::size_t total = 0;
    for (const Layer& layer : layers_) {
      for (const HeadStore& head : layer.heads) total += head.shared_bytes();
    }
    return total;
  }
  /// Device bytes besides: page tables, descriptions, selections. The engine's workspace is its own.
  [[nodiscard]] std::size_t overhead_bytes() const {
    std::size_t total = device_.bytes() + tree_.bytes();
    for (const Layer& layer : held(layers_)) {
      total += layer.overhead_bytes();
      for (const HeadStore& head : layer.heads) total += head.overhead_bytes();
    }
    return total;
  }

  [[nodiscard]] const Plan& plan() const { return plan_; }
  [[nodiscard]] const CacheOptions& options() const { return options_; }
  [[nodiscard]] const std::shared_ptr<Engine<element_type>>& engine() const { return engine_; }

  /// The cached rows that the next query of a head would read, or, with `appended` > 0, that an
  /// `attend` with so many queries would; brought to the host. Of a pending tree all nodes, and of the
  /// text what one right behind it would read. Waits for the stream.
  [[nodiscard]] CachedRows rows(std::size_t layer, std::size_t head, Read read = Read::all,
                                std::size_t appended = 0, cudaStream_t stream = nullptr) const {
    refuse_capture(stream, "rows");
    const ModelShape& shape = plan_.shape();
    require(head < shape.kv_heads, "cuda::KvCache: there is no KV head ", head, ", the shape has ",
            shape.kv_heads);
    const Layer& own = layers_[checked(layer)];
    const Request request{.queries = static_cast<int>(std::max<std::size_t>(appended, 1)),
                          .own_rows = appended == 0, .selected = read == Read::selected};
    return download_rows<element_type>(own.heads[head], own.state(), request, own.tree.nodes(),
                                       shape.head_dim, options_.page_rows, stream);
  }

  /// How the latest queries attend, of which the cache has kept some (`kept_queries`), at most
  /// `queries`: for each KV head of the layer [group, rows], each row's probability summed over them,
  /// in the order of `rows`. What plans may be chosen by (fastgen.hpp). Returns their number. Waits for
  /// the stream.
  /// @throws ShapeError if rows came without their queries, RollbackError if a tree is pending,
  /// CapacityError inside a capture, std::bad_alloc, DeviceError
  std::size_t observe(std::size_t layer, std::size_t queries, std::vector<std::vector<float>>& sums,
                      cudaStream_t stream = nullptr) const {
    const Layer& own = layers_[checked(layer)];
    refuse_capture(stream, "observe");
    const std::size_t known = check_observe(name, own, queries);
    latest_ = stream;
    sums.resize(own.heads.size());
    download_observation(*engine_, own, device_.heads(layer), device_.counters(layer), options_.page_rows,
                         known, options_.memory, stream, sums);
    return known;
  }

  /// A layer's heads [kv_heads] and its counters on the device, for launches of the caller's own
  /// (Engine::attend). Valid as long as the cache; what they say changes with every call.
  [[nodiscard]] const HeadView* device_heads(std::size_t layer) const { return device_.heads(checked(layer)); }
  [[nodiscard]] const LayerState* device_state(std::size_t layer) const {
    return device_.counters(checked(layer));
  }

  /// The pages of a head's exact rows, as CacheOptions::pool numbers them; empty if they do not come from it.
  /// An engine's own kernels need them for heads over EnginePageStorage: row r of a head that keeps all rows lies
  /// on page r / page_rows. Valid until the next call that changes the cache.
  [[nodiscard]] std::span<const PageId> page_ids(std::size_t layer, std::size_t head) const {
    require<ShapeError>(head < plan_.shape().kv_heads, "cuda::KvCache: there is no KV head ", head,
                        ", the shape has ", plan_.shape().kv_heads);
    return layers_[checked(layer)].heads[head].exact().ids();
  }

  /// Numbers that could not be quantised (core/quantizable.hpp) when their rows were: they were
  /// clamped, NaN to 0. kvpolicy::KvCache refuses a call with such a number. Waits for the stream.
  [[nodiscard]] std::size_t clamped_numbers(cudaStream_t stream = nullptr) const {
    refuse_capture(stream, "clamped_numbers");
    static_cast<void>(held(layers_));
    int count = 0;
    check(cudaMemcpyAsync(&count, device_.out_of_range(), sizeof count, cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    return static_cast<std::size_t>(count);
  }

 private:
  static constexpr std::string_view name = "cuda::KvCache";  // in messages

  friend class CacheForks<E>;
  friend class HostCopies<E>;  // cuda/host_copy.hpp

  KvCache(const Plan& plan, const CacheOptions& options, std::shared_ptr<Engine<E>> engine,
          cudaStream_t stream)
      : plan_{plan}, options_{options}, engine_{std::move(engine)}, latest_{stream} {}

  void require_own_shape() const {
    require(engine_->shape() == plan_.shape(),
            "cuda::KvCache: the engine was made for another model shape");
  }
  static void refuse_capture(cudaStream_t stream, const char* what) {
    require<CapacityError>(!is_capturing(stream), "cuda::KvCache: ", what,
                           " cannot be part of a graph, but the stream captures");
  }
  void refuse_tree(const char* what) const {
    for (const Layer& layer : held(layers_)) layer.tree.refuse(what);
  }
  // What has gone back to others already was moved out.
  void give_back() noexcept {
    if (engine_ != nullptr && options_.has_slow_memory()) engine_->join_copies(latest_);
    for (Layer& layer : layers_) layer.give_back_on(latest_);
    tree_.give_back_on(latest_);
    device_.give_back_on(latest_);
    if (engine_.use_count() == 1) engine_->give_back_on(latest_);
  }

  // ---- layers

  void make_layers(cudaStream_t stream) {
    const ModelShape& shape = plan_.shape();
    check_served(shape);
    std::vector<std::vector<HeadRule>> settings(shape.layers);
    for (std::size_t l = 0; l < shape.layers; ++l) {
      check_sharing(name, plan_, l);
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        settings[l].push_back(served_rule(plan_, l, head));
        const HeadRule& head_rule = settings[l].back();
        check_pages(head_rule, options_, shape.head_dim * sizeof(E));
        check_rollback(name, l, head, head_rule.compress_every > 0, accumulates(head_rule),
                       options_.max_rollback);
      }
    }
    device_ = DeviceState{shape, options_.has_slow_memory(), options_.memory, stream};
    DeviceWrites writes{stream};
    for (std::size_t l = 0; l < shape.layers; ++l) {
      const std::size_t queries = std::max(plan_.observed_queries(l), options_.kept_queries);
      layers_.emplace_back(Layer::Shape{shape, options_}, queries, stream);
      for (const HeadRule& head : settings[l]) {
        layers_[l].heads.emplace_back(head, store_context(), device_.frequencies(head, writes), writes);
      }
      device_.describe(l, layers_[l], writes);
    }
    if (accumulates_any()) engine_->prepare_accumulation(stream);
    writes.flush();
  }
  [[nodiscard]] bool accumulates_any() const { return std::ranges::any_of(layers_, &Layer::accumulates); }
  [[nodiscard]] StoreContext store_context() const {
    // More choices than these are not returned to: the next selected read behind such a rollback
    // chooses anew.
    return {.head_dim = plan_.shape().head_dim, .page_rows = options_.page_rows,
            .tail_rows = options_.tail_rows(),
            .selection_slots = Layer::selection_slots(options_.max_rollback),
            .memory = options_.memory, .pool = options_.pool, .has_slow_memory = options_.has_slow_memory(),
            .slow_memory = options_.slow_memory,
            .latest_rows = options_.latest_rows, .max_tokens = options_.max_tokens};
  }

  // Of all layers.
  void set_tokens(std::size_t tokens, std::size_t choices_until, cudaStream_t stream) const {
    engine_->set_states(device_.counters(0), device_.heads(0), layers_.size(),
                        {.tokens = static_cast<int>(tokens), .committed = -1}, choices_until, stream);
  }

  // ---- room

  // All memory before anything changes; what was in use goes once nothing reads it any more.
  void grow(std::size_t first, std::size_t count, std::size_t tokens, cudaStream_t stream) {
    require<CapacityError>(tokens < (std::size_t{1} << 30), "cuda::KvCache: ", tokens,
                           " tokens, must be fewer than 2^30");
    std::vector<HeadStore::Growth> growths;
    const std::span<Layer> layers{layers_.data() + first, count};
    for (Layer& layer : layers) {
      if (tokens <= layer.reserved) continue;
      for (HeadStore& head : layer.heads) growths.push_back(head.prepare(tokens, stream));
    }
    std::optional<StageExtent> extent;
    for (const Layer& layer : layers) {
      if (tokens <= layer.reserved || !layer.is_slow()) continue;
      extent = extent.value_or(StageExtent{}).united(layer.stage_extent(tokens, options_.max_tokens));
    }
    if (extent) make_staging(*extent, stream);
    DeviceWrites writes{stream};
    auto growth = growths.begin();
    for (std::size_t l = first; l < first + count; ++l) {
      Layer& layer = layers_[l];
      if (tokens <= layer.reserved) continue;
      layer.give_back_on(stream);
      layer.lay_out_staging(tokens, options_.max_tokens);
      for (HeadStore& head : layer.heads) head.grow(*growth++, writes, layer.furthest());
      device_.describe(l, layers_[l], writes);
      layer.reserved = tokens;
    }
    writes.flush();
  }
  // Two buffers for a layer's rows in slow memory. Nothing else has changed yet.
  void make_staging(const StageExtent& extent, cudaStream_t stream) {
    Staging& staging = engine_->staging();
    Staging::Growth growth = staging.prepare(extent, stream);
    staging.grow(growth, stream);
  }
  [[nodiscard]] StageExtent stage_extent() const {
    StageExtent extent;
    for (const Layer& layer : layers_) extent = extent.united(layer.stage_extent(0, 0));
    return extent;
  }
  // Whole pages, so that a step asks once for the tokens of a page.
  void make_room(std::size_t l, std::size_t tokens, bool capturing, cudaStream_t stream) {
    const Layer& layer = layers_[l];
    check_room(name, layer, tokens, options_.max_tokens);
    const std::size_t end = layer.tokens + tokens;
    if (end <= layer.reserved) return;
    require<CapacityError>(!capturing, "cuda::KvCache: ", tokens, " more tokens after ", layer.tokens,
                           " need more room than the ", layer.reserved,
                           " tokens reserved, and a graph cannot ask for it; reserve first");
    std::size_t pages = (end + options_.page_rows - 1) / options_.page_rows * options_.page_rows;
    if (options_.max_tokens != 0) pages = std::min(pages, options_.max_tokens);
    grow(l, 1, pages, stream);
  }

  [[nodiscard]] std::size_t checked(std::size_t layer) const {
    require<ShapeError>(layer < held(layers_).size(), "cuda::KvCache: there is no layer ", layer,
                        ", the plan has ", layers_.size());
    return layer;
  }

  // ---- the three calls

  using Rows = TensorView<const E>;

  void step_checked(std::size_t l, const Rows& q, const Rows& k, const Rows& v,
                    const TensorView<E>& out, const AttendOptions& options, cudaStream_t stream) {
    Layer& layer = layers_[checked(l)];
    const ModelShape& shape = plan_.shape();
    check_rows("q", q, q.tokens, shape.q_heads, shape.head_dim);
    check_rows("k", k, q.tokens, shape.kv_heads, shape.head_dim);
    check_rows("v", v, q.tokens, shape.kv_heads, shape.head_dim);
    check_rows("out", Rows{out}, q.tokens, shape.q_heads, shape.head_dim);
    check_written_once(MutableTensor{out});
    check_spans(options, q.tokens, shape.q_heads);
    const bool capturing = is_capturing(stream);
    refuse_captured_chooser(capturing, options, q.tokens);
    if (!capturing) latest_ = stream;
    require<CapacityError>(!capturing || !layer.compresses_by_itself(),
                           "cuda::KvCache: layer ", l,
                           " compresses by itself, for which it asks for memory: not in a graph");
    refuse_staging(l, options, capturing);
    check_growth("step", layer, q.tokens, options.tree, capturing);
    DeviceTree::Next next = prepare_tree(options.tree, q.tokens, stream);
    make_room(l, q.tokens, capturing, stream);
    if (q.tokens == 0) return;
    fetch_rows(l, options, stream);
    const Request request{.queries = static_cast<int>(q.tokens), .own_rows = true,
                          .selected = options.read == Read::selected,
                          .tree = write_tree(next, options.tree, q.tokens, stream)};
    attend_layer(l, request, q, &k, &v, out, options, capturing, stream);
    write_rows(l, &k, &v, q.tokens, q.tokens, stream);
    if (!capturing) {
      layer.queries.push(layer.tokens, q.tokens);
      layer.advance(q.tokens, q.tokens, options_.max_rollback);
      if (options.tree != nullptr) layer.tree.keep(*options.tree);
    }
    finish_call(l, q, options, capturing, stream);
  }

  void append_checked(std::size_t l, const Rows& k, const Rows& v, const TokenTree* tree,
                      cudaStream_t stream) {
    Layer& layer = layers_[checked(l)];
    const ModelShape& shape = plan_.shape();
    check_rows("k", k, k.tokens, shape.kv_heads, shape.head_dim);
    check_rows("v", v, k.tokens, shape.kv_heads, shape.head_dim);
    check_append(name, k.tokens, options_.max_append);
    const bool capturing = is_capturing(stream);
    if (!capturing) latest_ = stream;
    check_growth("append", layer, k.tokens, tree, capturing);
    make_room(l, k.tokens, capturing, stream);
    if (k.tokens == 0) return;
    // The new rows stay tentative until the next call, so that `attend` finds every head as it was
    // before them: a row must not be quantised yet.
    write_rows(l, &k, &v, k.tokens, 0, stream);
    if (!capturing) layer.advance(k.tokens, 0, options_.max_rollback);
    if (tree != nullptr) layer.tree.keep(*tree);
  }

  void attend_checked(std::size_t l, const Rows& q, const TensorView<E>& out,
                      const AttendOptions& options, cudaStream_t stream) {
    Layer& layer = layers_[checked(l)];
    const ModelShape& shape = plan_.shape();
    check_rows("q", q, q.tokens, shape.q_heads, shape.head_dim);
    check_rows("out", Rows{out}, q.tokens, shape.q_heads, shape.head_dim);
    check_written_once(MutableTensor{out});
    check_spans(options, q.tokens, shape.q_heads);
    const bool capturing = is_capturing(stream);
    refuse_captured_chooser(capturing, options, q.tokens);
    if (!capturing) latest_ = stream;
    require<CapacityError>(!capturing || !layer.compresses_by_itself(),
                           "cuda::KvCache: layer ", l,
                           " compresses by itself, for which it asks for memory: not in a graph");
    // While a graph is captured, the `append` in front was only recorded.
    require<ShapeError>(capturing ? q.tokens <= options_.tail_rows()
                                  : q.tokens <= layer.uncommitted(),
                        "cuda::KvCache::attend: ", q.tokens, " queries, but only the latest ",
                        layer.uncommitted(), " rows have not been committed");
    refuse_staging(l, options, capturing);
    if (options.tree == nullptr) {
      layer.tree.refuse("attend");
    } else {
      refuse_captured_tree(capturing);
      layer.tree.check_is(*options.tree, q.tokens);
    }
    if (q.tokens == 0) return;
    DeviceTree::Next next = prepare_tree(options.tree, q.tokens, stream);
    fetch_rows(l, options, stream);
    const Request request{.queries = static_cast<int>(q.tokens), .own_rows = false,
                          .selected = options.read == Read::selected,
                          .tree = write_tree(next, options.tree, q.tokens, stream)};
    attend_layer(l, request, q, nullptr, nullptr, out, options, capturing, stream);
    if (!capturing) layer.queries.push(layer.tokens - q.tokens, q.tokens);
    // What is added up cannot be taken back, so the rows that it belongs to may not be either.
    if (layer.accumulates()) {
      write_rows(l, nullptr, nullptr, 0, 0, stream, /*commit_all=*/true);
      if (!capturing) layer.advance(0, 0, 0);
    }
    finish_call(l, q, options, capturing, stream);
  }

  void attend_layer(std::size_t l, const Request& request, const Rows& q, const Rows* k,
                    const Rows* v, const TensorView<E>& out, const AttendOptions& options,
                    bool capturing, cudaStream_t stream) {
    Layer& layer = layers_[l];
    if (request.selected) {
      // A recorded refresh_selection is one of all heads, for that is what `replayed` takes it for.
      const bool all = options.refresh_selection || (capturing && layer.is_stale());
      layer.for_each_stale(all, [&](std::size_t first, std::size_t count) {
        refresh(l, first, count, q, options, request.own_rows ? q.tokens : 0, capturing, stream);
      });
    }
    AttendParams params{.heads = near_heads(l, request, stream), .states = device_.counters(l),
                        .kv_heads = static_cast<int>(layer.heads.size()),
                        .group = static_cast<int>(plan_.shape().queries_per_kv()),
                        .page_rows = static_cast<int>(options_.page_rows), .request = request,
                        .q = tensor_of(q), .out = tensor_of(Rows{out})};
    if (k != nullptr) params.k = tensor_of(*k);
    if (v != nullptr) params.v = tensor_of(*v);
    params.log_sum_exp = options.log_sum_exp.empty() ? nullptr : options.log_sum_exp.data();
    params.attention_sink_bias = options.attention_sink_bias.empty() ? nullptr : options.attention_sink_bias.data();
    params.scale_log2 =
        options.scale.value_or(1.0F / std::sqrt(static_cast<float>(q.head_dim))) * log2_e;
    params.softcap = options.softcap;
    const std::size_t longest = layer.longest_read(request);
    if (options_.launches == Launches::joint) {
      engine_->attend(params, layer.packs(), longest, stream);
    } else {
      layer.for_each_kind([&](std::size_t first, std::size_t count, bool packs) {
        engine_->attend(heads_of(params, first, count), packs, longest, stream);
      });
    }
    if (layer.accumulates()) accumulate(layer, params, stream);
    layer.queries.copy(params.states, request, params.q, stream);
    if (!capturing) layer.remember_logits(options, stream);
  }

  // Adds what a call's queries pay to the sums of heads that rank their rows by it. The rows are those
  // that the call has just read.
  void accumulate(const Layer& layer, const AttendParams& call, cudaStream_t stream) const {
    const auto memory = engine_->accumulation_memory();
    engine_->add_columns(
        {.observed = {.heads = call.heads, .state = call.states, .accumulates = true,
                      .kv_heads = call.kv_heads, .group = call.group, .page_rows = call.page_rows,
                      .request = call.request, .q = call.q, .k = call.k,
                      .attention_sink_bias = call.attention_sink_bias, .scale_log2 = call.scale_log2,
                      .softcap = call.softcap, .partial = memory.partial, .tickets = memory.tickets,
                      .log_sum_exp = memory.log_sum_exp}},
        call.request.queries, layer.packs(), stream);
  }

  // The rows of a call, or none and a commit; the device's counters move behind them.
  void write_rows(std::size_t l, const Rows* k, const Rows* v, std::size_t rows,
                  std::size_t commit_rows, cudaStream_t stream, bool commit_all = false) {
    const Layer& layer = layers_[l];
    AppendParams params{.heads = device_.heads(l), .states = device_.counters(l), .sequences = 1,
                        .kv_heads = static_cast<int>(layer.heads.size()),
                        .page_rows = static_cast<int>(options_.page_rows),
                        .rows = static_cast<int>(rows), .commit_rows = static_cast<int>(commit_rows),
                        .max_rollback = commit_all ? 0 : static_cast<int>(options_.max_rollback)};
    if (k != nullptr) params.k = tensor_of(*k);
    if (v != nullptr) params.v = tensor_of(*v);
    params.out_of_range = device_.out_of_range();
    engine_->append(params, layer.most_commit_jobs(rows), stream, layer.is_slow(), layer.flushes());
  }

  void commit_layer(std::size_t l, cudaStream_t stream) {
    Layer& layer = layers_[l];
    if (layer.uncommitted() == 0) return;
    write_rows(l, nullptr, nullptr, 0, 0, stream, /*commit_all=*/true);
    layer.advance(0, 0, 0);
  }

  // ---- trees

  static void refuse_captured_tree(bool capturing) {
    require<CapacityError>(!capturing, "cuda::KvCache: a tree of guesses cannot be part of a graph, but "
                           "the stream captures");
  }
  // `tokens` tokens are about to be added. Behind it the layer can note the tree without failing.
  void check_growth(const char* call, Layer& layer, std::size_t tokens, const TokenTree* tree,
                    bool capturing) const {
    if (tree == nullptr) return layer.tree.refuse(call);
    refuse_captured_tree(capturing);
    layer.tree.check_grows_to(*tree, tokens, options_.max_rollback);
    layer.tree.prepare(*tree, layer.text());
  }
  // A chain is read like any chunk, which needs no mask.
  static bool branches(const TokenTree* tree) {
    return tree != nullptr && !tree->empty() && tree->depth(tree->size() - 1) + 1 < tree->size();
  }
  [[nodiscard]] DeviceTree::Next prepare_tree(const TokenTree* tree, std::size_t queries,
                                              cudaStream_t stream) const {
    return branches(tree) && queries > 0 ? tree_.prepare(*tree, queries, stream) : DeviceTree::Next{};
  }
  // What the kernels are told of the tree that is prepared in `next`.
  [[nodiscard]] CallTree write_tree(DeviceTree::Next& next, const TokenTree* tree, std::size_t queries,
                                    cudaStream_t stream) {
    if (!branches(tree)) return {};
    tree_.write(next, queries, stream);
    return tree_.view();
  }
  // The rows of a path from its node `first` on, and their queries, join those before.
  void move_path(std::size_t root, std::span<const std::size_t> path, std::size_t first,
                 cudaStream_t stream) const {
    while (first < path.size()) {
      const std::size_t count = std::min<std::size_t>(path.size() - first, PathPart::most);
      PathPart part{.root = static_cast<int>(root), .first = static_cast<int>(first),
                    .count = static_cast<int>(count), .node = {}};
      for (std::size_t i = 0; i < count; ++i) {
        part.node[i] = static_cast<std::uint16_t>(path[first + i]);
      }
      engine_->accept_rows(device_.heads(0), plan_.shape().kv_head_count(), options_.page_rows, part,
                           stream);
      for (const Layer& layer : layers_) layer.queries.accept(part, stream);
      first += count;
    }
  }

  // ---- rows in slow memory

  void refuse_staging(std::size_t l, const AttendOptions& options, bool capturing) const {
    require<CapacityError>(!capturing || !layers_[l].stages(options.read == Read::selected),
                           "cuda::KvCache: layer ", l, " has heads in slow memory that read all their "
                           "rows, which are brought page by page as the text grows: not in a graph");
  }
  // Before anything is launched: the layer's rows, if they are not there or on the way, and the next
  // layer's, so that they come while this one is attended.
  void fetch_rows(std::size_t l, const AttendOptions& options, cudaStream_t stream) {
    const bool selected = options.read == Read::selected;
    if (!layers_[l].stages(selected)) return;
    Staging& staging = engine_->staging();
    const StagedLayer now = layers_[l].staged(selected);
    staging.fetch(now, 0, stream);
    const Layer& next = layers_[(l + 1) % layers_.size()];
    if (&next != &layers_[l] && next.stages(selected)) staging.fetch(next.staged(selected), now.id, stream);
  }
  // The heads of a layer with all that a call reads on the device.
  [[nodiscard]] const HeadView* near_heads(std::size_t l, const Request& request, cudaStream_t stream) {
    const Layer& layer = layers_[l];
    if (request.selected && layer.gathers()) {
      engine_->gather(device_.heads(l), device_.counters(l), options_.page_rows, stream);
    }
    const HeadView* heads = request.selected ? device_.selected_heads(l) : device_.heads(l);
    if (!layer.stages(request.selected)) return heads;
    std::byte* rows = engine_->staging().rows_of(layer.stage_id(), stream);
    return engine_->describe_staged(heads, device_.counters(l), request.selected, rows,
                                    options_.page_rows, stream);
  }

  // ---- choosing

  // `replayed` takes it that a call chooses by its last query.
  static void refuse_captured_chooser(bool capturing, const AttendOptions& options, std::size_t tokens) {
    require<CapacityError>(!capturing || options.selection_query.value_or(tokens - 1) + 1 == tokens,
                           "cuda::KvCache: selection_query is ", options.selection_query.value_or(0),
                           ", in a graph only the last of a call's ", tokens, " queries chooses");
  }
  // Of these heads, those that select choose by one of the call's queries. `own_rows`: rows of the call
  // that the counters lack.
  void refresh(std::size_t l, std::size_t first, std::size_t count, const Rows& q,
               const AttendOptions& options, std::size_t own_rows, bool capturing, cudaStream_t stream) {
    const std::size_t queries = options.selection_query.value_or(q.tokens - 1) + 1;
    const std::size_t behind = q.tokens - queries;  // rows behind the query that chooses
    Tensor rows = tensor_of(q);
    rows.data += static_cast<long long>(first * plan_.shape().queries_per_kv() * q.head_stride * sizeof(E));
    engine_->refresh(device_.heads(l) + first, device_.counters(l), count, rows, static_cast<int>(queries),
                     static_cast<int>(own_rows) - static_cast<int>(behind), options_.page_rows, stream);
    if (capturing) return;
    layers_[l].note_refresh(first, count, layers_[l].tokens + own_rows - behind, options_.max_rollback);
  }

  void finish_call(std::size_t l, const Rows& q, const AttendOptions& options, bool capturing,
                   cudaStream_t stream) {
    Layer& layer = layers_[l];
    // A read of all rows that asks for a refresh chooses for the reads that follow: behind the
    // call, so that its own rows can be chosen.
    if (options.read == Read::all && options.refresh_selection && layer.selects()) {
      refresh(l, 0, layer.heads.size(), q, options, 0, capturing, stream);
    }
    if (capturing || !layer.wants_compress()) return;
    KVPOLICY_TRY {
      commit_layer(l, stream);
      compress_layers(l, 1, /*only_due=*/true, stream);
    }
    KVPOLICY_CATCH(const std::bad_alloc&) {
      // The step itself is done and its rows are kept; the next one tries again.
    }
  }

  void compress_checked(std::size_t first, std::size_t count, cudaStream_t stream) {
    refuse_capture(stream, "compress");
    latest_ = stream;
    compress_layers(first, count, /*only_due=*/false, stream);
    for (std::size_t l = first; l < first + count; ++l) {
      for (HeadStore& head : layers_[l].heads) head.note_told_to_compress();
    }
  }
  void compress_layers(std::size_t first, std::size_t count, bool only_due, cudaStream_t stream) {
    std::vector<LayerCompression<E>> compressions;
    std::vector<std::size_t> places;
    std::size_t scratch_bytes = 0;
    for (std::size_t l = first; l < first + count; ++l) {
      Layer& layer = layers_[l];
      std::vector<bool> wanted = layer.heads_to_compress(only_due);
      if (std::ranges::count(wanted, true) == 0) continue;
      compressions.emplace_back(*engine_, layer, std::move(wanted), options_);
      if (compressions.back().shares()) {
        commit_layer(l, stream);
        compressions.back().share(device_.heads(l), device_.counters(l), stream);
      }
      compressions.back().prepare(stream);
      places.push_back(l);
      scratch_bytes = std::max(scratch_bytes, compressions.back().scratch_bytes());
    }
    DeviceBuffer scratch;
    if (scratch_bytes > 0) scratch = allocate(options_.memory, scratch_bytes, stream);
    for (std::size_t l = first; l < first + count; ++l) commit_layer(l, stream);
    for (std::size_t i = 0; i < compressions.size(); ++i) {
      const std::size_t l = places[i];
      compressions[i].run(scratch.get(), device_.heads(l), device_.counters(l), device_.out_of_range(), stream);
      DeviceWrites writes{stream};
      device_.describe_selected(l, layers_[l], writes);
      writes.flush();
    }
  }

  Plan plan_;
  CacheOptions options_;
  std::shared_ptr<Engine<E>> engine_;
  DeviceState device_;
  std::vector<Layer> layers_;
  DeviceTree tree_{options_.memory};
  // Reading a cache (rows, fork) is use, too.
  mutable cudaStream_t latest_ = nullptr;
};

/// `cuda::KvCache cache{plan}`, of any plan.
template <class... T>
KvCache(const HeadPlan<T...>&, const CacheOptions& = {}, cudaStream_t = nullptr)
    -> KvCache<typename HeadPlan<T...>::element_type>;
template <class... T>
KvCache(const HeadPlan<T...>&, const CacheOptions&, cudaStream_t,
        std::shared_ptr<Engine<typename HeadPlan<T...>::element_type>>)
    -> KvCache<typename HeadPlan<T...>::element_type>;

}  // namespace kvpolicy::cuda
