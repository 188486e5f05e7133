// SPDX-License-Identifier: Apache-2.0
//
// Writes the rows of a call to a layer's heads and commits rows, which may let heads compress: the half of a
// call that comes after its attention.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/cached_layers.hpp>
#include <kvpolicy/cuda/call_checks.hpp>
#include <kvpolicy/cuda/compression.hpp>

namespace kvpolicy::gpu {

/// Writes `rows` rows, or none, and commits; the device's counters move on after them. `k` and `v` may be null
/// where `rows` is 0. @throws DeviceError
template <Element E>
void write_rows(const CachedLayers<E>& cache, std::size_t l, const TensorView<const E>* k,
                const TensorView<const E>* v, std::size_t rows, std::size_t commit_rows, cudaStream_t stream,
                bool commit_all = false) {
  const Layer& layer = cache.layers[l];
  AppendParams params{.heads = cache.device.heads(l),
                      .states = cache.device.counters(l),
                      .sequences = 1,
                      .kv_heads = static_cast<int>(layer.heads.size()),
                      .page_rows = static_cast<int>(cache.options.page_rows),
                      .rows = static_cast<int>(rows),
                      .commit_rows = static_cast<int>(commit_rows),
                      .max_rollback = commit_all ? 0 : static_cast<int>(cache.options.max_rollback)};
  if (k != nullptr) params.k = tensor_of(*k);
  if (v != nullptr) params.v = tensor_of(*v);
  params.out_of_range = cache.device.out_of_range();
  cache.engine->append(params, layer.most_commit_jobs(rows), stream, layer.is_slow(), layer.flushes(),
                       layer.own_summaries);
}

/// Commits all rows of a layer on the device alone, as a call that is recorded in a graph must.
/// @throws DeviceError
template <Element E>
void write_commit(const CachedLayers<E>& cache, std::size_t l, cudaStream_t stream) {
  write_rows<E>(cache, l, nullptr, nullptr, 0, 0, stream, /*commit_all=*/true);
}

/// Commits all rows of a layer. @throws DeviceError
template <Element E>
void commit_layer(CachedLayers<E>& cache, std::size_t l, cudaStream_t stream) {
  Layer& layer = cache.layers[l];
  if (layer.uncommitted() == 0) return;
  write_commit(cache, l, stream);
  layer.advance(0, 0, 0);
}

/// Whether heads that share their budget over the model drop rows.
template <Element E>
[[nodiscard]] bool drops_in_model(const CachedLayers<E>& cache) {
  return std::ranges::any_of(cache.layers, &Layer::drops_in_model);
}

/// Lets the heads compete that share their budget over the model, after their layers' rows are committed. `places` are
/// those of the layers in the competition. Waits for the stream. @throws std::bad_alloc, CapacityError, DeviceError
template <Element E>
[[nodiscard]] SharedBudget<E> share_in_model(CachedLayers<E>& cache, std::vector<std::size_t>& places,
                                             cudaStream_t stream) {
  std::vector<CompetingLayer> competing;
  for (std::size_t l = 0; l < cache.layers.size(); ++l) {
    places[l] = competing.size();
    if (!cache.layers[l].shares_in_model()) continue;
    commit_layer(cache, l, stream);
    competing.push_back({&cache.layers[l], cache.device.heads(l), cache.device.counters(l)});
  }
  return {*cache.engine,        competing, SharedBudget<E>::Among::model, cache.options.page_rows,
          cache.options.memory, stream};
}

/// Commits `count` layers from `first` on and lets their heads drop rows, all of them or those that are due. Heads that
/// share their budget over the model drop rows where these are all layers.
/// @throws std::bad_alloc, CapacityError, DeviceError
template <Element E>
void compress_layers(CachedLayers<E>& cache, std::size_t first, std::size_t count, bool only_due,
                     cudaStream_t stream) {
  const DeviceState& device = cache.device;
  std::vector<std::size_t> in_competition(cache.layers.size(), 0);
  std::optional<SharedBudget<E>> shared;
  if (!only_due && count == cache.layers.size() && drops_in_model(cache)) {
    shared.emplace(share_in_model(cache, in_competition, stream));
  }
  std::vector<LayerCompression<E>> compressions;
  std::vector<std::size_t> places;
  std::size_t scratch_bytes = 0;
  std::size_t observed_rows = 0;
  for (std::size_t l = first; l < first + count; ++l) {
    Layer& layer = cache.layers[l];
    std::vector<bool> wanted = layer.heads_to_compress(only_due, shared.has_value());
    if (std::ranges::count(wanted, true) == 0) continue;
    observed_rows += layer.observed_rows(wanted, shared.has_value());
    compressions.emplace_back(*cache.engine, layer, std::move(wanted), cache.options,
                              shared ? &*shared : nullptr, in_competition[l]);
    if (compressions.back().shares()) {
      commit_layer(cache, l, stream);
      compressions.back().share(device.heads(l), device.counters(l), stream);
    }
    compressions.back().prepare(stream);
    places.push_back(l);
    scratch_bytes = std::max(scratch_bytes, compressions.back().scratch_bytes());
  }
  DeviceBuffer scratch;
  if (scratch_bytes > 0) scratch = allocate(cache.options.memory, scratch_bytes, stream);
  for (std::size_t l = first; l < first + count; ++l) commit_layer(cache, l, stream);
  cache.observed_rows += observed_rows;
  for (std::size_t i = 0; i < compressions.size(); ++i) {
    const std::size_t l = places[i];
    compressions[i].run(scratch.get(), device.heads(l), device.counters(l), device.out_of_range(), stream);
    DeviceWrites writes{stream};
    device.describe_selected(l, cache.layers[l], writes);
    writes.flush();
  }
}

}  // namespace kvpolicy::gpu
