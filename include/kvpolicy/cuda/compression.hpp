// SPDX-License-Identifier: Apache-2.0
//
// Lets heads of one layer drop the rows that their latest queries attend to least: observe, choose,
// move the survivors to pages of their own, give the old ones back. How many survive is known
// without asking the device, so nothing waits.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/options.hpp>

namespace kvpolicy::cuda {

/// Places in one block of device memory; without a block it only counts what they need.
class Places {
 public:
  explicit Places(std::byte* start = nullptr) : start_{start} {}

  template <class T>
  [[nodiscard]] T* take(std::size_t count) {
    constexpr std::size_t alignment = 256;
    const std::size_t at = bytes_;
    bytes_ += (count * sizeof(T) + alignment - 1) / alignment * alignment;
    return start_ == nullptr ? nullptr : reinterpret_cast<T*>(start_ + at);
  }
  [[nodiscard]] std::size_t bytes() const { return bytes_; }

 private:
  std::byte* start_;
  std::size_t bytes_ = 0;
};

/// What a compression needs on the device while it goes on.
struct CompressionMemory {
  HeadView* to = nullptr;  // all [kv_heads]
  Compression* how = nullptr;
  const int** kept = nullptr;
  const long long** old_positions = nullptr;
  long long** new_positions = nullptr;
  int* old_counts = nullptr;  // two to a word, as they are written
  int* counts = nullptr;
  std::uint32_t* tickets = nullptr;
  int* rows = nullptr;             // [kv_heads, survivors]
  PartialState* partial = nullptr; // [kv_heads, blocks, columns]
  float* log_sum_exp = nullptr;    // [kv_heads, columns]
  float* scores = nullptr;         // [kv_heads, rows]

  CompressionMemory(Places& places, std::size_t heads, std::size_t survivors, std::size_t rows_,
                    std::size_t blocks, std::size_t columns)
      : to{places.take<HeadView>(heads)}, how{places.take<Compression>(heads)},
        kept{places.take<const int*>(heads)}, old_positions{places.take<const long long*>(heads)},
        new_positions{places.take<long long*>(heads)}, old_counts{places.take<int>(heads + 1)},
        counts{places.take<int>(heads)}, tickets{places.take<std::uint32_t>(heads)},
        rows{places.take<int>(heads * survivors)},
        partial{places.take<PartialState>(heads * blocks * columns)},
        log_sum_exp{places.take<float>(heads * columns)}, scores{places.take<float>(heads * rows_)} {}
};

/// Compresses the `wanted` heads of a layer whose rows are all committed. Their stores change; the
/// caller writes their views. @throws std::bad_alloc, with the layer as it was; DeviceError
template <Element E>
void compress_layer(const Engine<E>& engine, Layer& layer, const std::vector<bool>& wanted,
                    const HeadView* views, const LayerState* state, const CacheOptions& options,
                    int* out_of_range, cudaStream_t stream) {
  const std::size_t heads = layer.heads.size();
  const ModelShape& shape = engine.shape();
  std::size_t longest = 0;
  std::size_t window = 1;
  std::size_t rows = 0;
  bool drops = false;
  bool packs = false;
  const auto rows_of = [&](std::size_t head) { return layer.tokens - layer.heads[head].evicted(); };
  const auto survivors_of = [&](std::size_t head) {
    const HeadSettings& settings = layer.heads[head].settings();
    return std::min(rows_of(head), settings.budget + settings.window);
  };
  for (std::size_t head = 0; head < heads; ++head) {
    if (!wanted[head]) continue;
    longest = std::max(longest, survivors_of(head));
    window = std::max(window, layer.heads[head].settings().window);
    rows = std::max(rows, rows_of(head));
    drops = drops || survivors_of(head) < rows_of(head);
    packs = packs || layer.heads[head].settings().is_packed();
  }

  const auto blocks = static_cast<std::size_t>(engine.observe_blocks());
  const auto columns = static_cast<std::size_t>(
      observe_columns(static_cast<int>(shape.group()), static_cast<int>(window)));
  Places counted;
  static_cast<void>(CompressionMemory{counted, heads, longest, rows, blocks, columns});
  const Block block = allocate(options.memory, counted.bytes(), stream);
  Places places{block.get()};
  const CompressionMemory memory{places, heads, longest, rows, blocks, columns};
  check(cudaMemsetAsync(memory.tickets, 0, heads * sizeof(std::uint32_t), stream), "cudaMemsetAsync");

  DeviceWrites writes{stream};
  std::vector<std::optional<HeadStore>> to(heads);
  struct TwoCounts {
    int count[2] = {};
  };
  TwoCounts old_counts;
  for (std::size_t head = 0; head < heads; ++head) {
    const HeadStore& from = layer.heads[head];
    const HeadSettings& settings = from.settings();
    Compression how;
    HeadView view;
    if (wanted[head]) {
      to[head] = from.compacted(survivors_of(head), layer.tokens, layer.reserved, writes);
      view = to[head]->view();
      how = {.window = static_cast<int>(settings.window), .budget = static_cast<int>(settings.budget),
             .kernel = static_cast<int>(settings.pooled_rows),
             .average = settings.pooling == Pooling::average};
    }
    writes.write(memory.to + head, view);
    writes.write(memory.how + head, how);
    writes.write(memory.kept + head,
                 wanted[head] ? static_cast<const int*>(memory.rows + head * longest) : nullptr);
    writes.write(memory.old_positions + head,
                 reinterpret_cast<const long long*>(from.positions().get()));
    writes.write(memory.new_positions + head,
                 wanted[head] ? reinterpret_cast<long long*>(to[head]->positions().get()) : nullptr);
    old_counts.count[head % 2] = static_cast<int>(from.survivors());
    if (head % 2 == 1 || head + 1 == heads) {
      writes.write(reinterpret_cast<TwoCounts*>(memory.old_counts) + head / 2, old_counts);
    }
  }
  writes.flush();

  const auto pitch = static_cast<long long>(rows);
  const auto kv_heads = static_cast<int>(heads);
  if (drops) {
    const float scale = layer.scale.value_or(1.0F / std::sqrt(static_cast<float>(shape.head_dim)));
    engine.observe({.heads = views, .state = state, .compressions = memory.how, .kv_heads = kv_heads,
                    .group = static_cast<int>(shape.group()),
                    .page_rows = static_cast<int>(options.page_rows),
                    .window = static_cast<int>(window), .queries = layer.queries.data(),
                    .query_slots = static_cast<int>(layer.queries.slots()),
                    .first_query = static_cast<int>(layer.queries.end() - layer.queries.size()),
                    .sink_logits = layer.sink_logits(), .scale_log2 = scale * log2_e,
                    .softcap = layer.softcap, .partial = memory.partial, .tickets = memory.tickets,
                    .log_sum_exp = memory.log_sum_exp, .scores = memory.scores, .pitch = pitch},
                   packs, stream);
  }
  engine.keep({.heads = views, .state = state, .compressions = memory.how, .scores = memory.scores,
               .pitch = pitch, .kept = const_cast<int* const*>(memory.kept), .counts = memory.counts},
              stream);
  engine.compact({.from = views, .to = memory.to, .kv_heads = kv_heads,
                  .page_rows = static_cast<int>(options.page_rows), .kept = memory.kept,
                  .counts = memory.counts, .old_positions = memory.old_positions,
                  .old_counts = memory.old_counts, .new_positions = memory.new_positions,
                  .out_of_range = out_of_range},
                 longest, stream);
  for (std::size_t head = 0; head < heads; ++head) {
    if (wanted[head]) layer.heads[head] = std::move(*to[head]);
  }
}

}  // namespace kvpolicy::cuda
