// SPDX-License-Identifier: Apache-2.0
//
// How the latest queries of a layer attend, of which the cache has kept some: for a compression, and
// brought to the host for choosing plans.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvpolicy/cuda/array_carver.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/writes.hpp>

namespace kvpolicy::gpu {

/// Describes an observation by a layer's kept queries, whose logits are made as those of its latest call.
/// The rows are those that the next query would read. Clears the tickets. @throws DeviceError
template <Element E>
[[nodiscard]] ObserveParams observe_latest(const Engine<E>& engine, const Layer& layer, const HeadView* views,
                                           const LayerState* state, int page_rows,
                                           const typename Engine<E>::ObserveMemory& memory,
                                           cudaStream_t stream) {
  const ModelShape& shape = engine.shape();
  const QueryRing& queries = layer.queries;
  check(cudaMemsetAsync(memory.tickets, 0, shape.kv_heads * sizeof(std::uint32_t), stream),
        "cudaMemsetAsync");
  const float scale = layer.scale.value_or(1.0F / std::sqrt(static_cast<float>(shape.head_dim)));
  return {.heads = views,
          .state = state,
          .kv_heads = static_cast<int>(shape.kv_heads),
          .group = static_cast<int>(shape.queries_per_kv()),
          .page_rows = page_rows,
          .q = queries.view(),
          .query_slots = static_cast<int>(queries.slots()),
          .first_query = static_cast<int>(queries.end() - queries.size()),
          .attention_sink_bias = layer.attention_sink_bias(),
          .scale_log2 = scale * log2_e,
          .softcap = layer.softcap,
          .partial = memory.partial,
          .tickets = memory.tickets,
          .log_sum_exp = memory.log_sum_exp};
}

/// What the latest `count` queries pay each row that the next query would read: for each KV head
/// [group, rows], in the order of the rows. At least one query is kept. `views` and `state` are the
/// layer's on the device. Waits for the stream. @throws std::bad_alloc, DeviceError
template <Element E>
void download_observation(const Engine<E>& engine, const Layer& layer, const HeadView* views,
                          const LayerState* state, std::size_t page_rows, std::size_t count,
                          MemoryResource* resource, cudaStream_t stream,
                          std::vector<std::vector<float>>& sums) {
  const std::size_t heads = layer.heads.size();
  const std::size_t group = engine.shape().queries_per_kv();
  std::vector<std::size_t> rows(heads, 0);
  std::size_t pitch = 0;
  for (std::size_t head = 0; head < heads; ++head) {
    const DeviceSegmentList shown = segments_of(layer.heads[head].view(), layer.state(), Request{});
    for (int s = 0; s < shown.count; ++s) {
      const DeviceSegment& segment = shown.segment[s];
      if (segment.source != DeviceSegment::Source::call) rows[head] += static_cast<std::size_t>(segment.rows);
    }
    sums[head].assign(group * rows[head], 0.0F);
    pitch = std::max(pitch, rows[head]);
  }
  if (pitch == 0 || count == 0) return;

  struct TwoCounts {
    int count[2] = {};
  };
  const auto most = static_cast<int>(std::min<std::size_t>(count, most_observing));
  struct Memory {
    const long long** survivors;
    int* counts;
    float* sums;
    typename Engine<E>::ObserveMemory observe;
  };
  const auto take = [&](ArrayCarver& carver) {
    return Memory{carver.take<const long long*>(heads), carver.take<int>(heads + 1),
                  carver.take<float>(heads * group * pitch), engine.observe_memory(carver, most)};
  };
  ArrayCarver counted;
  static_cast<void>(take(counted));
  const DeviceBuffer block = allocate(resource, counted.bytes(), stream);
  ArrayCarver carver{block.get()};
  const Memory memory = take(carver);

  DeviceWrites writes{stream};
  TwoCounts counts;
  for (std::size_t head = 0; head < heads; ++head) {
    const HeadStore& store = layer.heads[head];
    writes.write(memory.survivors + head, reinterpret_cast<const long long*>(store.positions().get()));
    counts.count[head % 2] = static_cast<int>(store.survivors());
    if (head % 2 == 1 || head + 1 == heads) {
      writes.write(reinterpret_cast<TwoCounts*>(memory.counts) + head / 2, counts);
    }
  }
  writes.flush();
  const std::size_t numbers = heads * group * pitch;
  check(cudaMemsetAsync(memory.sums, 0, numbers * sizeof(float), stream), "cudaMemsetAsync");
  ColumnSumsParams params{.observed = observe_latest(engine, layer, views, state, static_cast<int>(page_rows),
                                                     memory.observe, stream),
                          .sums = memory.sums,
                          .pitch = static_cast<long long>(pitch)};
  params.observed.survivors = memory.survivors;
  params.observed.survivor_counts = memory.counts;
  engine.add_columns(params, static_cast<int>(count), layer.packs(), stream);

  std::vector<float> all(numbers);
  check(cudaMemcpyAsync(all.data(), memory.sums, numbers * sizeof(float), cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  for (std::size_t head = 0; head < heads; ++head) {
    for (std::size_t member = 0; member < group; ++member) {
      std::copy_n(all.data() + (head * group + member) * pitch, rows[head],
                  sums[head].data() + member * rows[head]);
    }
  }
}

}  // namespace kvpolicy::gpu
