// SPDX-License-Identifier: Apache-2.0
//
// A device cache as a cache of the host, and back: the same plan, the same text, the same rows. For saved
// files (cuda/saved_cache.hpp) and for sequences that give up their device memory for a while.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/cache/progress_checks.hpp>
#include <kvpolicy/cuda/head_download.hpp>
#include <kvpolicy/cuda/head_upload.hpp>
#include <kvpolicy/cuda/kv_cache.hpp>

namespace kvpolicy::gpu {

namespace detail {

/// Pages of the host for the rows that a cache has in an engine's tensor, while they are on their way to or from
/// a file.
class HostPages {
 public:
  /// `device`: the engine's pages on the device; null: the cache has no rows there, and needs no pages here.
  /// Where they take `bytes` on the device, `heads` heads find room here. @throws std::bad_alloc
  HostPages(const PagePool* device, std::size_t bytes, std::size_t heads) {
    if (device == nullptr) return;
    const PageRows& rows = device->engine_rows();
    const std::size_t page_bytes = 2 * rows.page_rows * rows.row_bytes;
    // A window is a ring on the device. Here it may begin and end within a page.
    const std::size_t pages = bytes / page_bytes + 2 * heads;
    memory_ = std::make_unique_for_overwrite<std::byte[]>(pages * page_bytes);
    pool_.emplace(EnginePages{.arenas = {{memory_.get(), pages * page_bytes}},
                              .blocks = pages,
                              .block_stride = page_bytes,
                              .page_rows = rows.page_rows,
                              .row_stride = rows.row_bytes,
                              .row_bytes = rows.row_bytes,
                              .values_offset = page_bytes / 2});
  }
  [[nodiscard]] PagePool* pool() { return pool_ ? &*pool_ : nullptr; }

 private:
  std::unique_ptr<std::byte[]> memory_;
  std::optional<PagePool> pool_;
};

/// Output projections that nobody reads: for a cache of the host that a text passes through on its way to or from a
/// file, where no rows are weighed.
class UnreadOutputs {
 public:
  explicit UnreadOutputs(const ModelShape& shape) : zeros_(shape.head_dim, 0.0F), outputs_{shape} {
    for (std::size_t l = 0; l < shape.layers; ++l) {
      outputs_.set(l, TensorView<const float>{zeros_.data(), 1, shape.q_heads, shape.head_dim, 0, 0});
    }
  }
  [[nodiscard]] const kvpolicy::ValueOutputs* get() const { return &outputs_; }

 private:
  std::vector<float> zeros_;
  kvpolicy::ValueOutputs outputs_;
};

}  // namespace detail

/// What carries out `to_host` and `to_device`, which are what to call.
template <Element E>
class HostCopies {
  using Device = KvCache<E>;

 public:
  using Host = kvpolicy::KvCache<E>;

  /// The pool of an engine's pages that heads of the cache lie in; null if none does.
  [[nodiscard]] static const PagePool* pool_of(const Device& cache) {
    for (const Layer& layer : held(cache.cache_.layers)) {
      for (const HeadStore& head : layer.heads) {
        if (head.settings().engine_pages) return cache.cache_.options.pool;
      }
    }
    return nullptr;
  }
  /// Options of a host cache that takes what a device cache of these options takes.
  [[nodiscard]] static kvpolicy::CacheOptions host_options(const CacheOptions& options, PagePool* pool,
                                                           const kvpolicy::ValueOutputs* outputs) {
    kvpolicy::CacheOptions own;
    own.max_rollback = options.max_rollback;
    own.max_append = options.max_append;
    own.max_tokens = options.max_tokens;
    own.page_rows = options.page_rows;
    own.pool = pool;
    own.value_outputs = outputs;
    return own;
  }

  [[nodiscard]] static Host to_host(const Device& device, const char* call, cudaStream_t stream,
                                    PagePool* pool, const kvpolicy::ValueOutputs* outputs) {
    const CachedLayers<E>& from = device.cache_;
    refuse_capture(stream, call);
    check_between_steps<Layer>(call, held(from.layers), device.tokens());
    from.enter(stream);
    Host to{from.plan, host_options(from.options, pool, outputs)};
    CacheLayers::observed_rows_of(to) = from.observed_rows;
    for (std::size_t l = 0; l < from.layers.size(); ++l) {
      download(from, from.layers[l], CacheLayers::of(to)[l], stream);
    }
    return to;
  }

  template <class Engine>
  static void to_device(const kvpolicy::KvCache<E, Engine>& from, Device& to, cudaStream_t stream) {
    const auto& layers = CacheLayers::of(from);
    check_between_steps<CacheLayer<E>>("to_device", held(layers), from.tokens());
    to.cache_.observed_rows = from.observed_rows();
    to.cache_.enter(stream);
    for (std::size_t l = 0; l < layers.size(); ++l) upload(layers[l], to.cache_, l, stream);
    to.cache_.order.mark();
  }

 private:
  static void wait(cudaStream_t stream) { check(cudaStreamSynchronize(stream), "cudaStreamSynchronize"); }

  static void download(const CachedLayers<E>& cache, const Layer& from, CacheLayer<E>& to,
                       cudaStream_t stream) {
    const StoreContext context = cache.store_context();
    std::vector<HeadDownload<E>> heads;
    heads.reserve(from.heads.size());
    for (const HeadStore& head : from.heads) heads.emplace_back(head, context, stream);
    std::vector<E> queries(from.queries.held().size() * from.queries.query_numbers());
    from.queries.download(reinterpret_cast<std::uint16_t*>(queries.data()), stream);
    if (from.attention_sink_bias() != nullptr) {
      to.attention_sink_bias.resize(cache.plan.shape().q_heads);
      check(cudaMemcpyAsync(to.attention_sink_bias.data(), from.attention_sink_bias(),
                            to.attention_sink_bias.size() * sizeof(float), cudaMemcpyDeviceToHost, stream),
            "cudaMemcpyAsync");
    }
    wait(stream);
    for (std::size_t head = 0; head < heads.size(); ++head) {
      to.heads[head]->take(heads[head].contents(from.committed, from.choices(head)), context.head_dim);
    }
    write_tail(heads, from, to, context.head_dim);
    const ModelShape& shape = cache.plan.shape();
    to.queries.push(ConstTensor{TensorView<const E>{queries.data(), from.queries.held().size(), shape.q_heads,
                                                    shape.head_dim}},
                    from.queries.held().begin());
    static_cast<TextProgress<std::size_t>&>(to) = from;
    to.scale = from.scale;
    to.softcap = from.softcap;
  }

  static void write_tail(const std::vector<HeadDownload<E>>& heads, const Layer& from, CacheLayer<E>& to,
                         std::size_t head_dim) {
    const std::size_t rows = from.uncommitted();
    std::vector<E> sides[2];
    for (const bool key : {true, false}) {
      for (std::size_t row = from.committed; row < from.tokens; ++row) {
        for (std::size_t head = 0; head < heads.size(); ++head) {
          const E* numbers = heads[head].exact_row(row - from.heads[head].evicted(), key);
          sides[key ? 0 : 1].insert(sides[key ? 0 : 1].end(), numbers, numbers + head_dim);
        }
      }
    }
    const auto tensor = [&](const std::vector<E>& side) {
      return ConstTensor{TensorView<const E>{side.data(), rows, heads.size(), head_dim}};
    };
    to.tail.write(tensor(sides[0]), tensor(sides[1]), 0, rows, from.committed);
  }

  static void upload(const CacheLayer<E>& from, CachedLayers<E>& cache, std::size_t l, cudaStream_t stream) {
    Layer& to = cache.layers[l];
    if (from.tokens == 0) return;
    const StoreContext context = cache.store_context();
    const std::size_t count = to.heads.size();
    std::vector<HeadContents> contents(count);
    std::vector<kvpolicy::SegmentList> tails(count);
    std::vector<HeadUpload<E>> uploads;
    uploads.reserve(count);
    DeviceWrites writes{stream};
    for (std::size_t head = 0; head < count; ++head) {
      contents[head] = from.heads[head]->contents(from.committed);
      from.for_each_uncommitted(head, [&](const kvpolicy::Segment& rows) { tails[head].push_back(rows); });
      uploads.emplace_back(to.heads[head].settings(), contents[head], tails[head], from.tokens, context);
      uploads[head].begin(to.heads[head], writes);
    }
    writes.flush();
    // The block that is not full may have codes, and then needs its page.
    const bool coded =
        std::ranges::any_of(to.heads, [](const HeadStore& head) { return head.coded_rows() > 0; });
    cache.grow(l, 1, from.tokens + (coded ? static_cast<std::size_t>(quantized_together) : 0), stream);
    for (std::size_t head = 0; head < count; ++head) {
      uploads[head].run(to.heads[head], *cache.engine, cache.device.heads(l) + head, cache.device.counters(l),
                        stream);
      uploads[head].choose(to.heads[head], to.choices(head), stream);
    }
    static_cast<TextProgress<std::size_t>&>(to) = from;
    to.reached = from.tokens;
    to.scale = from.scale;
    to.softcap = from.softcap;
    to.take_sink_logits(from.attention_sink_bias, stream);
    std::vector<E> queries(from.queries.held().size() * to.queries.query_numbers());
    from.queries.copy_held(queries.data());
    to.queries.upload(reinterpret_cast<const std::uint16_t*>(queries.data()), from.queries.held(), stream);
    writes.write(cache.device.counters(l), to.state());
    writes.flush();
    wait(stream);  // what was copied lies in this function
  }
};

/// A cache of the host with the same plan and text, which goes on as `cache` would, to the rounding of the
/// two engines: same tokens, commit points, rows, selections and kept queries. Takes as much host memory as
/// the cache holds, and waits for the stream.
/// @throws RollbackError inside a step or while a tree is pending, CaptureError inside a capture,
/// std::bad_alloc, DeviceError; ConfigError or OutOfMemory where heads lie in an engine's pages and `pool`,
/// which must then be one of an engine's pages in the host's memory, has none for them; ConfigError where heads weigh
/// rows by the output projection and `value_outputs`, which has them in the host's memory, is null
template <Element E>
[[nodiscard]] kvpolicy::KvCache<E> to_host(const KvCache<E>& cache, cudaStream_t stream = nullptr,
                                           PagePool* pool = nullptr,
                                           const kvpolicy::ValueOutputs* value_outputs = nullptr) {
  return HostCopies<E>::to_host(cache, "to_host", stream, pool, value_outputs);
}

/// The way back, to a device cache that has `options`. Rows that the host has quantised keep their codes. Those
/// of the latest block of 64, which is not full, are read as numbers of type E until it is. Waits for the stream.
/// @throws ConfigError for a plan or options that a device cache refuses, CapacityError if the text does not fit
/// the options, RollbackError inside a step or while a tree is pending; std::bad_alloc, DeviceError
template <Element E, class HostEngine>
[[nodiscard]] KvCache<E> to_device(const kvpolicy::KvCache<E, HostEngine>& cache,
                                   const CacheOptions& options = {}, cudaStream_t stream = nullptr,
                                   std::shared_ptr<Engine<E>> engine = nullptr) {
  KvCache<E> device{cache.plan(), options, stream, std::move(engine)};
  require<CapacityError>(options.max_tokens == 0 || cache.tokens() <= options.max_tokens, "to_device: holds ",
                         cache.tokens(), " tokens, max_tokens is ", options.max_tokens);
  const std::size_t tentative = cache.tokens() - cache.commit_point();
  require<CapacityError>(tentative <= options.tail_rows(), "to_device: ", tentative,
                         " rows that can be taken back, the cache has room for max_rollback + max_append = ",
                         options.tail_rows());
  HostCopies<E>::to_device(cache, device, stream);
  return device;
}

}  // namespace kvpolicy::gpu
