// SPDX-License-Identifier: Apache-2.0
//
// What a device cache consists of: the layers of one sequence, what they share, and the memory that all of
// them obtain for a longer text. Calls (layer_call.hpp), commits (commit.hpp) and forks (forks.hpp) work on
// it, and KvCache (kv_cache.hpp) is their public face.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/cache/call_checks.hpp>
#include <kvpolicy/cache/plan_checks.hpp>
#include <kvpolicy/cache/progress_checks.hpp>
#include <kvpolicy/cuda/bound_room.hpp>
#include <kvpolicy/cuda/device_state.hpp>
#include <kvpolicy/cuda/device_tree.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/options.hpp>
#include <kvpolicy/cuda/served_rule.hpp>
#include <kvpolicy/cuda/writes.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy::gpu {

/// Refuses a call that cannot be recorded in a graph. @throws CaptureError if the stream captures
inline void refuse_capture(cudaStream_t stream, const char* what) {
  require<CaptureError>(!is_capturing(stream), "gpu::KvCache: ", what,
                        " cannot be part of a graph, but the stream captures");
}

/// One sequence on a device, of which KvCache says how it may be used.
template <Element E>
class CachedLayers {
 public:
  static constexpr std::string_view name = "gpu::KvCache";  // in messages

  HeadPlan<E> plan;
  CacheOptions options;
  std::shared_ptr<Engine<E>> engine;
  DeviceState device;
  std::vector<Layer> layers;
  DeviceTree tree{options.memory};
  BoundRoom bound_room;           ///< of reads with a bound that graphs record
  std::size_t observed_rows = 0;  ///< see KvCache::observed_rows
  mutable StreamOrder order;      ///< of all calls; reading (rows, fork) is one, too

  /// Without layers yet. No engine: makes one. @throws as KvCache's constructor
  CachedLayers(HeadPlan<E> own_plan, const CacheOptions& own_options, cudaStream_t stream,
               std::shared_ptr<Engine<E>> own_engine)
      : plan{std::move(own_plan)}, options{own_options}, engine{std::move(own_engine)}, order{stream} {
    options.validate();
    if (engine == nullptr) engine = std::make_shared<Engine<E>>(plan.shape(), options.memory, stream);
    require(engine->shape() == plan.shape(), "gpu::KvCache: the engine was made for another model shape");
  }
  CachedLayers(CachedLayers&&) noexcept = default;
  CachedLayers& operator=(CachedLayers&& other) noexcept {
    if (this == &other) return *this;
    give_back();
    plan = std::move(other.plan);
    options = other.options;
    engine = std::move(other.engine);
    device = std::move(other.device);
    layers = std::move(other.layers);
    tree = std::move(other.tree);
    bound_room = std::move(other.bound_room);
    observed_rows = other.observed_rows;
    order = std::move(other.order);
    return *this;
  }
  ~CachedLayers() { give_back(); }

  /// Empty layers. @throws ConfigError, std::bad_alloc, DeviceError
  void make_layers(cudaStream_t stream) {
    const ModelShape& shape = plan.shape();
    check_served(shape);
    if (options.value_outputs != nullptr) options.value_outputs->check_fits(shape);
    std::vector<std::vector<HeadRule>> settings(shape.layers);
    for (std::size_t l = 0; l < shape.layers; ++l) {
      check_sharing(name, plan, l);
      for (std::size_t head = 0; head < shape.kv_heads; ++head) {
        settings[l].push_back(served_rule(plan, l, head));
        const HeadRule& head_rule = settings[l].back();
        engine->own_kernels().check_has(head_rule);
        check_pages(head_rule, options, shape.head_dim * sizeof(E));
        check_outputs<E>(head_rule, options, l);
        check_rollback(name, l, head, head_rule.compress_every > 0, gpu::accumulates(head_rule),
                       options.max_rollback);
      }
    }
    device = DeviceState{shape, options.has_slow_memory(), options.memory, stream};
    DeviceWrites writes{stream};
    for (std::size_t l = 0; l < shape.layers; ++l) {
      const std::size_t queries = std::max(plan.observed_queries(l), options.kept_queries);
      layers.emplace_back(Layer::Shape{shape, options}, queries, stream);
      for (const HeadRule& head : settings[l]) {
        layers[l].heads.emplace_back(head, store_context(), device.frequencies(head, writes), writes);
      }
      layers[l].list_own_summaries();
      if (options.value_outputs != nullptr) layers[l].outputs = options.value_outputs->layer(l);
      device.describe(l, layers[l], writes);
    }
    if (accumulates()) engine->prepare_accumulation(stream);
    writes.flush();
    order.mark();
  }

  /// A call on `stream` begins. @throws DeviceError
  void enter(cudaStream_t stream) const {
    order.enter(stream);
    engine->enter(stream);
  }
  /// Whether any head adds up the attention of every call.
  [[nodiscard]] bool accumulates() const { return std::ranges::any_of(layers, &Layer::accumulates); }
  [[nodiscard]] StoreContext store_context() const {
    // More choices are not remembered: after a rollback beyond them the next selected read chooses again.
    return {.head_dim = plan.shape().head_dim,
            .page_rows = options.page_rows,
            .tail_rows = options.tail_rows(),
            .selection_slots = Layer::selection_slots(options.max_rollback),
            .memory = options.memory,
            .pool = options.pool,
            .has_slow_memory = options.has_slow_memory(),
            .slow_memory = options.slow_memory,
            .latest_rows = options.latest_rows,
            .max_tokens = options.max_tokens};
  }
  /// A layer's number, if there is such a layer. @throws ShapeError
  [[nodiscard]] std::size_t checked(std::size_t layer) const {
    require<ShapeError>(layer < held(layers).size(), "gpu::KvCache: there is no layer ", layer,
                        ", the plan has ", layers.size());
    return layer;
  }
  /// @throws RollbackError if a tree is pending
  void refuse_tree(const char* what) const {
    for (const Layer& layer : held(layers)) layer.tree.refuse(what);
  }

  /// Makes room for a text of `tokens` in `count` layers from `first` on: obtains all memory before anything
  /// changes, and gives memory that was in use back once nothing reads it any more.
  /// @throws CapacityError, std::bad_alloc, DeviceError
  void grow(std::size_t first, std::size_t count, std::size_t tokens, cudaStream_t stream) {
    require<CapacityError>(tokens < (std::size_t{1} << 30), "gpu::KvCache: ", tokens,
                           " tokens, must be fewer than 2^30");
    std::vector<HeadStore::Growth> growths;
    const std::span<Layer> growing{layers.data() + first, count};
    for (Layer& layer : growing) {
      if (tokens <= layer.reserved) continue;
      for (HeadStore& head : layer.heads) growths.push_back(head.prepare(tokens, stream));
    }
    std::optional<StageExtent> extent;
    for (const Layer& layer : growing) {
      if (tokens <= layer.reserved || !layer.is_slow()) continue;
      extent = extent.value_or(StageExtent{}).united(layer.stage_extent(tokens, options.max_tokens));
    }
    if (extent) make_staging(*extent, stream);
    DeviceWrites writes{stream};
    auto growth = growths.begin();
    for (std::size_t l = first; l < first + count; ++l) {
      Layer& layer = layers[l];
      if (tokens <= layer.reserved) continue;
      layer.give_back_on(stream);
      layer.lay_out_staging(tokens, options.max_tokens);
      for (HeadStore& head : layer.heads) head.grow(*growth++, writes, layer.furthest());
      device.describe(l, layers[l], writes);
      layer.reserved = tokens;
    }
    writes.flush();
  }
  /// Room for reads with a bound of so many tokens in graphs, where some head has keys in halves.
  /// @throws std::bad_alloc, DeviceError
  void make_bound_room(std::size_t tokens, cudaStream_t stream) {
    if (std::ranges::none_of(layers, &Layer::has_halves)) return;
    const std::size_t most =
        options.max_tokens == 0 ? std::numeric_limits<std::size_t>::max() : options.max_tokens;
    bound_room.reserve(tokens, most, static_cast<int>(plan.shape().kv_heads),
                       engine->device().multiprocessors, options.memory, stream);
  }
  /// Room for `tokens` more in one layer: whole pages, so that a step asks once for the tokens of a page.
  /// @throws as `grow`
  void make_room(std::size_t l, std::size_t tokens, bool capturing, cudaStream_t stream) {
    const Layer& layer = layers[l];
    check_room(name, layer, tokens, options.max_tokens);
    const std::size_t end = layer.tokens + tokens;
    if (end <= layer.reserved) return;
    require<CaptureError>(!capturing, "gpu::KvCache: ", tokens, " more tokens after ", layer.tokens,
                          " need more room than the ", layer.reserved,
                          " tokens reserved, and a graph cannot ask for it; reserve first");
    std::size_t pages = (end + options.page_rows - 1) / options.page_rows * options.page_rows;
    if (options.max_tokens != 0) pages = std::min(pages, options.max_tokens);
    grow(l, 1, pages, stream);
  }

  /// Two buffers for a layer's rows in slow memory. Nothing else changes. @throws std::bad_alloc, DeviceError
  void make_staging(const StageExtent& extent, cudaStream_t stream) {
    Staging& staging = engine->staging();
    Staging::Growth growth = staging.prepare(extent, stream);
    staging.grow(growth, stream);
  }
  [[nodiscard]] StageExtent stage_extent() const {
    StageExtent extent;
    for (const Layer& layer : layers) extent = extent.united(layer.stage_extent(0, 0));
    return extent;
  }

 private:
  // A cache that was moved from has nothing to give back.
  void give_back() noexcept {
    if (engine == nullptr) return;
    const LastUse use = LastUse::of_many(order.end());
    if (options.has_slow_memory()) engine->join_copies(use.stream());
    for (Layer& layer : layers) layer.give_back_on(use);
    tree.give_back_on(use);
    bound_room.give_back_on(use);
    device.give_back_on(use);
    if (engine.use_count() > 1) engine->leave(use.stream());
  }
};

}  // namespace kvpolicy::gpu
