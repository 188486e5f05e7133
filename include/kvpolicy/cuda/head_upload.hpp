// SPDX-License-Identifier: Apache-2.0
//
// The host's form of a head's rows goes to a device head that has no row yet. Quantised rows are copied as
// they are, in whole blocks; the others are appended as exact rows, by the kernel that appends a call's.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/head_store.hpp>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/packed_pages.hpp>
#include <kvpolicy/policy/head_contents.hpp>

namespace kvpolicy::gpu {

/// One head's rows on their way to the device. Lives until its stream was waited for: what is copied lies
/// in it.
template <Element E>
class HeadUpload {
 public:
  /// `contents` are of a text of `tokens` tokens, whose rows that can still be taken back are `tail`.
  HeadUpload(const HeadRule& rule, const HeadContents& contents, const kvpolicy::SegmentList& tail,
             std::size_t tokens, const StoreContext& context)
      : contents_{&contents}, tail_{&tail}, tokens_{tokens}, context_{context} {
    if (!rule.compresses) return;
    evicted_ = contents.committed;
    for (const kvpolicy::Segment& segment : contents.rows) evicted_ -= segment.rows;
  }

  /// The head's store, if it is not one that has never compressed. @throws std::bad_alloc, DeviceError
  void begin(HeadStore& store, DeviceWrites& writes) {
    const bool compressed =
        evicted_ > 0 || (store.is_quantization_deferred() && !contents_->quantization_deferred);
    if (compressed) {
      for (const kvpolicy::Segment& rows : contents_->rows) {
        for (std::size_t i = 0; i < rows.rows; ++i) positions_.push_back(rows.position_of(i));
      }
      const auto evicted = static_cast<long long>(evicted_);
      while (!positions_.empty() &&
             positions_.back() == static_cast<long long>(positions_.size() - 1) + evicted) {
        positions_.pop_back();  // its position follows from its number
      }
      HeadStore other = store.compacted(positions_.size(), evicted_ + positions_.size(), tokens_, writes);
      writes.flush();
      store.give_back_on(writes.stream());
      store = std::move(other);
      send(store.positions().get(), positions_, writes.stream());
    }
    if (contents_->compressed_once) store.set_compressed_once();
    if (store.settings().compresses) {
      store.set_evicted_unshared(contents_->committed - contents_->unshared_rows);
    }
    if (store.settings().waits_for_scoring) {
      const auto& sums = contents_->accumulated;
      const auto unscored = sums.end() - std::ranges::find(sums, HeadContents::unscored);
      store.set_scored(contents_->committed - static_cast<std::size_t>(unscored));
    }
    // Rows of the block that is not full may have codes, and more of their keys with KIVI's flush.
    const auto committed = static_cast<int>(contents_->committed);
    const auto packed_end = static_cast<std::size_t>(store.view().packed_end(committed));
    const auto flushed = static_cast<std::size_t>(store.view().keys_end(committed));
    const std::size_t most = std::max(flushed, packed_end + quantized_rows);
    coded_[0] = std::min(quantized_end(store, true), most);
    coded_[1] = std::min(quantized_end(store, false), packed_end + quantized_rows);
    store.note_coded(coded_[0] > packed_end ? coded_[0] : 0, coded_[1] > packed_end ? coded_[1] : 0);
  }

  /// Once there is room for the text: puts the rows on the stream. `view` and `state` are the head's and its
  /// layer's on the device; the counters are used meanwhile. @throws std::bad_alloc, DeviceError
  void run(const HeadStore& store, const Engine<E>& engine, const HeadView* view, LayerState* state,
           cudaStream_t stream) {
    const auto stored = contents_->committed - evicted_;
    const std::size_t sinks = std::min<std::size_t>(store.settings().sinks, tokens_);
    if (sinks > 0) append(store, engine, view, state, 0, sinks, contents_->committed, stream);
    const std::size_t first = std::max(store.settings().window_rule().first_kept(stored), sinks);
    const auto packed_end =
        static_cast<std::size_t>(store.view().packed_end(static_cast<int>(contents_->committed)));
    send_packed(store, first, stream);
    // Whole blocks that are quantised on the host, or whose rows are gone.
    const std::size_t coded = std::max(std::min(coded_[0], coded_[1]), first);
    const std::size_t blocks = (coded - std::min(coded, sinks)) / quantized_rows * quantized_rows;
    const std::size_t packed = std::min(sinks + blocks, std::max(packed_end, sinks));
    // So many rows were committed when those blocks had been quantised and no other.
    const std::size_t committed = packed >= packed_end ? contents_->committed
                                  : packed == sinks    ? evicted_
                                                       : evicted_ + packed + store.settings().residual;
    const std::size_t rows = tokens_ - evicted_;
    append(store, engine, view, state, std::min(std::max(first, packed), rows), rows, committed, stream);
    send_summaries(store, stream);
    if (accumulates(store.settings())) {
      send(reinterpret_cast<std::byte*>(store.sums().data()), contents_->accumulated, stream);
    }
  }

  /// The choices of chunks; `made` are those of the layer. @throws DeviceError
  void choose(const HeadStore& store, HeadChoices& made, cudaStream_t stream) {
    if (store.view().selections == nullptr) return;
    const std::size_t slots = context_.selection_slots;
    const auto budget = static_cast<std::size_t>(store.view().budget_chunks);
    const ChunkRule<std::size_t> rule = store.settings().chunk_rule();
    numbers_.assign(slots * (3 + budget), 0);
    for (const ChosenChunks& choice : contents_->choices) {
      made.add(choice.tokens, choice.committed, slots);
      const std::size_t slot = made.ring.latest;
      std::size_t count = 0;
      for (const RowRun& run : choice.runs) {
        for (std::size_t row = run.first; row < run.first + run.rows; row += rule.chunk) {
          numbers_[3 * slots + slot * budget + count++] = static_cast<int>(row / rule.chunk);
        }
      }
      numbers_[slot] = static_cast<int>(choice.tokens);
      numbers_[slots + slot] = static_cast<int>(rule.closed_rows(choice.committed));
      numbers_[2 * slots + slot] = static_cast<int>(count);
    }
    auto* block = reinterpret_cast<std::byte*>(store.view().selections);
    send(block + sizeof(Selections), numbers_, stream);
    counters_ = {static_cast<int>(made.ring.latest), static_cast<int>(made.ring.valid)};
    send(block, counters_, stream);
  }

 private:
  static constexpr std::size_t quantized_rows = quantized_together;  // together

  template <class T>
  void send(std::byte* to, const std::vector<T>& numbers, cudaStream_t stream) {
    if (numbers.empty()) return;
    check(cudaMemcpyAsync(to, numbers.data(), numbers.size() * sizeof(T), cudaMemcpyDefault, stream),
          "cudaMemcpyAsync");
  }

  // visit(segment, row in it, row number) of the rows [first, last), committed or in the tail.
  template <class Visit>
  void for_each_row(std::size_t first, std::size_t last, Visit visit) const {
    std::size_t number = 0;  // in the order of the text
    const auto look = [&](const kvpolicy::Segment& rows, bool numbered) {
      for (std::size_t i = 0; i < rows.rows; ++i, ++number) {
        // A window's rows have their position as their number.
        const std::size_t row = numbered ? number : static_cast<std::size_t>(rows.position) + i;
        if (row >= first && row < last) visit(rows, i, row);
      }
    };
    for (const kvpolicy::Segment& rows : contents_->rows) look(rows, rows.positions != nullptr);
    number = contents_->committed - evicted_;
    for (const kvpolicy::Segment& rows : *tail_) look(rows, true);
  }

  // The first row that follows quantised ones and is not quantised on one side as the head's rule says; 0 if
  // none is.
  [[nodiscard]] std::size_t quantized_end(const HeadStore& store, bool key) const {
    const std::size_t stored = contents_->committed - evicted_;
    if (!store.settings().is_quantized() || store.is_quantization_deferred()) return 0;
    const PackedPages pages{store.settings(), context_.head_dim, context_.page_rows};
    const std::size_t first = std::max(store.settings().window_rule().first_kept(stored),
                                       std::min<std::size_t>(store.settings().sinks, tokens_));
    std::size_t end = first;
    for_each_row(first, stored, [&](const kvpolicy::Segment& rows, std::size_t, std::size_t row) {
      if (row == end && (key ? rows.keys : rows.values).format == pages.format(key)) ++end;
    });
    return end > first ? end : 0;
  }

  // Appends the rows [first, last) as exact rows, where `committed` tokens were committed before.
  void append(const HeadStore& store, const Engine<E>& engine, const HeadView* view, LayerState* state,
              std::size_t first, std::size_t last, std::size_t committed, cudaStream_t stream) {
    const std::size_t rows = last - std::min(first, last);
    const std::size_t head_dim = context_.head_dim;
    std::vector<E>& numbers = exact_.emplace_back(2 * rows * head_dim);
    std::vector<float> row(head_dim);
    for_each_row(first, last, [&](const kvpolicy::Segment& segment, std::size_t i, std::size_t number) {
      for (const bool key : {true, false}) {
        load_row(key ? segment.keys : segment.values, i, row);
        std::ranges::transform(
            row,
            numbers.begin() + static_cast<std::ptrdiff_t>(((key ? 0 : rows) + number - first) * head_dim),
            [](float x) { return E{x}; });
      }
    });
    const DeviceBuffer& block = blocks_.emplace_back(
        allocate(context_.memory, std::max<std::size_t>(numbers.size(), 8) * sizeof(E), stream));
    send(block.get(), numbers, stream);
    DeviceWrites writes{stream};
    const std::size_t before = first + evicted_;
    writes.write(state,
                 LayerState{static_cast<int>(before), static_cast<int>(std::min(committed, before + rows))});
    writes.flush();
    const std::size_t after = before + rows;
    AppendParams params{.heads = view,
                        .states = state,
                        .sequences = 1,
                        .kv_heads = 1,
                        .page_rows = static_cast<int>(context_.page_rows),
                        .rows = static_cast<int>(rows),
                        .commit_rows = static_cast<int>(rows),
                        .max_rollback = static_cast<int>(after - std::min(after, contents_->committed))};
    params.k = {.data = block.get(), .token_stride = static_cast<long long>(head_dim)};
    params.v = {.data = block.get() + rows * head_dim * sizeof(E),
                .token_stride = static_cast<long long>(head_dim)};
    engine.append(params, store.settings().is_quantized() || store.settings().chunk > 0 ? rows / 8 + 1 : 0,
                  stream, store.is_slow(), store.settings().kivi_flush);
  }

  // The codes of the rows from `first` on, as far as they have any, in the pages of the device.
  void send_packed(const HeadStore& store, std::size_t first, cudaStream_t stream) {
    const std::size_t last = std::max(coded_[0], coded_[1]);
    if (!store.settings().is_quantized() || store.is_quantization_deferred() || first >= last) return;
    const PackedPages pages{store.settings(), context_.head_dim, context_.page_rows};
    std::vector<std::byte>& images = images_.emplace_back(store.packed().count() * pages.page_bytes());
    for_each_row(first, last, [&](const kvpolicy::Segment& segment, std::size_t i, std::size_t row) {
      const auto slot = static_cast<std::size_t>(store.view().packed_slot(static_cast<int>(row)));
      std::byte* page = images.data() + slot / context_.page_rows * pages.page_bytes();
      for (const bool key : {true, false}) {
        if (row >= coded_[key ? 0 : 1]) continue;
        pages.row_to_device(key ? segment.keys : segment.values, i, key,
                            static_cast<int>(slot % context_.page_rows), page);
      }
    });
    for (std::size_t i = 0; i < store.packed().count(); ++i) {
      for (std::byte* place : {store.packed().page(i), store.near_packed_page(i, contents_->committed)}) {
        if (place == nullptr) continue;
        check(cudaMemcpyAsync(place, images.data() + i * pages.page_bytes(), pages.page_bytes(),
                              cudaMemcpyDefault, stream),
              "cudaMemcpyAsync");
      }
    }
  }

  void send_summaries(const HeadStore& store, cudaStream_t stream) {
    if (contents_->summaries.empty()) return;
    const std::size_t closed = store.settings().chunk_rule().closed(contents_->committed);
    const std::size_t vectors = contents_->summaries.size();
    const std::size_t row_bytes = context_.head_dim * sizeof(E);
    const std::size_t page_bytes = vectors * context_.page_rows * row_bytes;
    std::vector<std::byte>& images = images_.emplace_back(store.summaries().count() * page_bytes);
    std::vector<float> row(context_.head_dim);
    for (std::size_t v = 0; v < vectors; ++v) {
      for (std::size_t chunk = 0; chunk < closed; ++chunk) {
        load_row(contents_->summaries[v], chunk, row);
        store_dense(encoding_of<E>, row,
                    images.data() + chunk / context_.page_rows * page_bytes +
                        (v * context_.page_rows + chunk % context_.page_rows) * row_bytes);
      }
    }
    for (std::size_t i = 0; i < store.summaries().count(); ++i) {
      check(cudaMemcpyAsync(store.summaries().page(i), images.data() + i * page_bytes, page_bytes,
                            cudaMemcpyDefault, stream),
            "cudaMemcpyAsync");
    }
  }

  const HeadContents* contents_;
  const kvpolicy::SegmentList* tail_;
  std::size_t tokens_;
  StoreContext context_;
  std::size_t evicted_ = 0;
  std::size_t coded_[2] = {};  // keys and values: rows before it are quantised, and stay so
  std::vector<long long> positions_;
  std::vector<std::vector<E>> exact_;
  std::vector<std::vector<std::byte>> images_;
  std::vector<int> numbers_, counters_;
  std::vector<DeviceBuffer> blocks_;
};

}  // namespace kvpolicy::gpu
