// SPDX-License-Identifier: Apache-2.0
//
// One KV head's memory on the device: its pages, and the HeadView that describes them to the kernels.
// Rows are written by kernels; nothing here waits.
#pragma once

#include <algorithm>
#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include <kvpolicy/cuda/head_geometry.hpp>
#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/pages.hpp>
#include <kvpolicy/cuda/row_sums.hpp>
#include <kvpolicy/cuda/served_rule.hpp>
#include <kvpolicy/cuda/slow_store.hpp>

namespace kvpolicy::gpu {

/// Rows of one head. Not synchronised; every member puts its work on the stream of `writes`.
class HeadStore {
 public:
  /// `frequencies`: [head_dim / 2] on the device, for a head with in-cache positions.
  HeadStore(const HeadRule& settings, const StoreContext& context, const float* frequencies,
            DeviceWrites& writes)
      : HeadStore{settings, context, frequencies, settings.compresses && settings.is_quantized(), 0, writes} {
    if (!slow_) return;
    slow_->begin(0, writes);
    slow_->describe(slow_pages(), writes);
  }

  [[nodiscard]] const HeadRule& settings() const { return settings_; }
  [[nodiscard]] const HeadView& view() const { return view_; }
  /// Whether rows stay exact until the first compression.
  [[nodiscard]] bool is_quantization_deferred() const { return quantization_deferred_; }
  [[nodiscard]] std::size_t evicted() const { return static_cast<std::size_t>(view_.evicted); }
  /// Tokens whose rows the head would have dropped if it shared its budget with no other head.
  [[nodiscard]] std::size_t evicted_unshared() const { return evicted_unshared_; }
  void set_evicted_unshared(std::size_t tokens) { evicted_unshared_ = tokens; }
  /// Whether the head has been compressed at least once, also if no row was dropped.
  [[nodiscard]] bool compressed_once() const { return compressed_once_; }
  void set_compressed_once() { compressed_once_ = true; }
  [[nodiscard]] const Pages& exact() const { return exact_; }
  [[nodiscard]] const Pages& packed() const { return packed_; }
  [[nodiscard]] const Pages& summaries() const { return summaries_; }
  /// Whether rows are in slow memory: the exact pages, or the packed ones of a head that has them.
  [[nodiscard]] bool is_slow() const { return slow_.has_value(); }
  [[nodiscard]] const Pages& slow_pages() const { return slow_->geometry().packed ? packed_ : exact_; }
  /// As a selected read finds it: the rows of the choice have been gathered (kernels/gather.cuh).
  [[nodiscard]] HeadView selected_view() const {
    HeadView view = view_;
    if (!slow_ || settings_.chunk == 0) return view;
    view.evicted -= static_cast<int>(slow_->shift_rows());
    (slow_->geometry().packed ? view.packed_pages : view.exact_pages) = slow_->shifted_table();
    view.selections = slow_->chosen();
    return view;
  }
  /// Pages that a read of all rows must have staged, of a text that came to `furthest`.
  [[nodiscard]] std::size_t slow_only_pages(const LayerState& furthest) const {
    return slow_->slow_only_pages(entered_pages(furthest));
  }
  /// Room that a text of `tokens` takes where rows are staged.
  [[nodiscard]] std::size_t staged_pages(std::size_t tokens) const {
    return slow_ ? HeadGeometry{settings_, context_, quantization_deferred_}.slow_pages(tokens) : 0;
  }
  [[nodiscard]] std::size_t slow_page_bytes() const { return slow_ ? slow_->geometry().page_bytes : 0; }
  void set_stage_offset(const StageOffset& offset) { slow_->set_stage_offset(offset); }
  [[nodiscard]] const StageOffset& stage_offset() const { return slow_->stage_offset(); }
  /// Where a packed page of a head in slow memory lies besides, on the device; null if it does not, in a text
  /// whose first `committed` tokens are committed.
  [[nodiscard]] std::byte* near_packed_page(std::size_t page, std::size_t committed) const {
    if (!slow_ || !slow_->geometry().packed) return nullptr;
    const std::size_t entered = entered_pages({static_cast<int>(committed), static_cast<int>(committed)});
    return page < entered && page >= slow_->slow_only_pages(entered) ? slow_->latest_page(page) : nullptr;
  }
  /// Keys before row `keys` and values before row `values` have codes, though their block is not full.
  void note_coded(std::size_t keys, std::size_t values) {
    view_.coded_keys = static_cast<int>(keys);
    view_.coded_values = static_cast<int>(values);
  }
  /// How many rows besides the sinks have codes because of that.
  [[nodiscard]] std::size_t coded_rows() const {
    return static_cast<std::size_t>(std::max({view_.coded_keys, view_.coded_values, view_.sinks}) -
                                    view_.sinks);
  }
  /// Text positions of the rows that survived the last compression, [survivors]; null before.
  [[nodiscard]] const DeviceBuffer& positions() const { return positions_; }
  [[nodiscard]] std::size_t survivors() const { return survivors_; }
  /// The attention that was added up for each row; empty where the head does not rank by it.
  [[nodiscard]] const RowSums& sums() const { return sums_; }
  /// Rows of tokens up to here were in a scoring pass, of a head that waits for one. A pass sees all rows that the head
  /// holds, so those that none has seen are the latest.
  [[nodiscard]] std::size_t scored() const { return scored_; }
  void set_scored(std::size_t tokens) { scored_ = tokens; }

  [[nodiscard]] std::size_t bytes() const {
    return exact_.bytes() + packed_.bytes() + summaries_.bytes() + (slow_ ? slow_->bytes() : 0);
  }
  /// The part of `bytes()` that is in slow memory.
  [[nodiscard]] std::size_t slow_bytes() const { return slow_ ? slow_pages().bytes() : 0; }
  [[nodiscard]] std::size_t shared_bytes() const {
    return exact_.shared_bytes() + packed_.shared_bytes() + summaries_.shared_bytes();
  }
  /// Page tables, positions, selections and scores: bookkeeping, not in `bytes`.
  [[nodiscard]] std::size_t overhead_bytes() const {
    return exact_.table_bytes() + packed_.table_bytes() + summaries_.table_bytes() +
           survivors_ * sizeof(long long) + selection_bytes() + scored_chunks_ * sizeof(float) +
           sums_.bytes() + (slow_ ? slow_->overhead_bytes() : 0);
  }

  /// Memory for a longer text, obtained before anything changes.
  struct Growth {
    Pages::Growth exact;
    Pages::Growth packed;
    Pages::Growth summaries;
    SlowStore::Growth slow;
    RowSums::Growth sums;
    DeviceBuffer scores;
    std::size_t scored_chunks = 0;
  };
  /// For a text of `tokens`. @throws std::bad_alloc
  [[nodiscard]] Growth prepare(std::size_t tokens, cudaStream_t stream) {
    const std::size_t rows = tokens - std::min(tokens, evicted());
    const HeadGeometry geometry{settings_, context_, quantization_deferred_};
    Growth growth;
    growth.exact = exact_.prepare(geometry.exact_pages(rows), stream);
    growth.packed = packed_.prepare(geometry.packed_pages(rows), stream);
    growth.summaries = summaries_.prepare(geometry.summary_pages(rows), stream);
    if (slow_) growth.slow = slow_->prepare(geometry.slow_pages(rows), stream);
    if (accumulates(settings_)) growth.sums = sums_.prepare(rows, context_.memory, stream);
    const std::size_t chunks = geometry.closed_chunks(rows);
    if (chunks > scored_chunks_) {
      growth.scores = allocate(context_.memory, chunks * sizeof(float), stream);
      growth.scored_chunks = chunks;
    }
    return growth;
  }
  /// The view is then to be written again; what it no longer names comes back in `growth`.
  /// `furthest`: how far the text ever came, of a head in slow memory. @throws DeviceError
  void grow(Growth& growth, DeviceWrites& writes, const LayerState& furthest = {}) {
    const std::size_t before = slow_ ? slow_pages().count() : 0;
    exact_.grow(growth.exact, writes);
    packed_.grow(growth.packed, writes);
    summaries_.grow(growth.summaries, writes);
    if (slow_) slow_->grow(growth.slow, slow_pages(), before, entered_pages(furthest), writes);
    sums_.grow(growth.sums, writes.stream());
    if (growth.scored_chunks > 0) {
      std::swap(scores_, growth.scores);  // nothing to keep: scores live from kernel to kernel
      scored_chunks_ = growth.scored_chunks;
    }
    describe_pages();
  }
  // ---- a sequence that waits (swapped_cache.hpp)

  /// Its pages on the device: exact, packed, summaries.
  [[nodiscard]] std::array<Pages*, 3> pages() { return {&exact_, &packed_, &summaries_}; }

  /// Where the memory goes back.
  void give_back_on(const LastUse& use) noexcept {
    for (Pages* own : pages()) own->give_back_on(use);
    if (slow_) slow_->give_back_on(use);
    sums_.give_back_on(use);
    for (DeviceBuffer* block : {&selections_, &scores_, &positions_}) block->give_back_on(use);
  }

  /// An independent store with the same rows: full pages of committed rows are shared. `reached`: the
  /// most tokens that the text ever had.
  [[nodiscard]] HeadStore fork(std::size_t tokens, std::size_t committed, std::size_t reached,
                               const float* frequencies, DeviceWrites& writes) const {
    const HeadGeometry geometry{settings_, context_, quantization_deferred_};
    const std::size_t rows = tokens - evicted();
    const std::size_t firm = committed - std::min(committed, evicted());
    const std::size_t page_rows = context_.page_rows;
    HeadStore other{settings_, context_, frequencies, quantization_deferred_, evicted(), writes};
    other.compressed_once_ = compressed_once_;
    // A ring is written in place, so nothing of it can be shared.
    const std::size_t sinks = std::min(firm, settings_.sinks) / page_rows;
    // A page that is not shared is open, so the device has a copy of it, and nothing is read from slow memory.
    const auto source_of = [&](const Pages& pages) {
      return [this, &pages](std::size_t i) {
        return slow_ && &pages == &slow_pages() ? slow_->latest_page(i) : pages.page(i);
      };
    };
    other.exact_ = exact_.fork(geometry.exact_ring() > 0 ? sinks : firm / page_rows,
                               geometry.exact_pages(rows), writes, source_of(exact_));
    const auto packed_rows =
        static_cast<std::size_t>(view_.packed_end(static_cast<int>(committed)) - view_.sinks);
    other.view_.coded_keys = view_.coded_keys;
    other.view_.coded_values = view_.coded_values;
    const std::size_t coded = HeadGeometry::pages_of(coded_rows(), page_rows);
    other.packed_ = packed_.fork(geometry.packed_ring() > 0 ? 0 : packed_rows / page_rows,
                                 std::max(geometry.packed_pages(rows), coded), writes, source_of(packed_));
    const std::size_t chunks = geometry.closed_chunks(firm);
    other.summaries_ = summaries_.fork(chunks / page_rows, geometry.summary_pages(rows), writes);
    other.evicted_unshared_ = evicted_unshared_;
    if (survivors_ > 0) {
      other.survivors_ = survivors_;
      other.positions_ = allocate(context_.memory, survivors_ * sizeof(long long), writes.stream());
      check(cudaMemcpyAsync(other.positions_.get(), positions_.get(), survivors_ * sizeof(long long),
                            cudaMemcpyDeviceToDevice, writes.stream()),
            "cudaMemcpyAsync");
    }
    if (selections_ != nullptr) {
      // What the choices are, but not where they lie, which the new store has written already.
      writes.flush();
      check(cudaMemcpyAsync(other.selections_.get() + sizeof(Selections),
                            selections_.get() + sizeof(Selections), selection_bytes() - sizeof(Selections),
                            cudaMemcpyDeviceToDevice, writes.stream()),
            "cudaMemcpyAsync");
      constexpr std::size_t counters = offsetof(Selections, slots);
      check(cudaMemcpyAsync(other.selections_.get(), selections_.get(), counters, cudaMemcpyDeviceToDevice,
                            writes.stream()),
            "cudaMemcpyAsync");
    }
    other.sums_ = sums_.fork(context_.memory, writes.stream());
    other.scored_ = scored_;
    if (scored_chunks_ > 0) {
      other.scores_ = allocate(context_.memory, scored_chunks_ * sizeof(float), writes.stream());
      other.scored_chunks_ = scored_chunks_;
    }
    if (slow_) {
      const std::size_t entered = entered_pages({static_cast<int>(reached), static_cast<int>(committed)});
      other.slow_->copy_latest(*slow_, entered, writes.stream());
      other.slow_->set_stage_offset(slow_->stage_offset());
      other.slow_->begin(entered, writes);
      SlowStore::Growth table = other.slow_->prepare(other.slow_pages().count(), writes.stream());
      other.slow_->grow(table, other.slow_pages(), 0, entered, writes);
    }
    other.describe_pages();
    return other;
  }

  /// An empty store for the `survivors` rows of a text of `tokens`, with room for `capacity` tokens;
  /// compact.cuh fills rows and `positions`.
  [[nodiscard]] HeadStore compacted(std::size_t survivors, std::size_t tokens, std::size_t capacity,
                                    DeviceWrites& writes) const {
    HeadStore other{settings_, context_, view_.inverse_frequencies, false, tokens - survivors, writes};
    other.survivors_ = survivors;
    other.compressed_once_ = compressed_once_;
    other.scored_ = scored_;
    if (survivors > 0) {
      other.positions_ = allocate(context_.memory, survivors * sizeof(long long), writes.stream());
    }
    Growth growth = other.prepare(std::max(tokens, capacity), writes.stream());
    other.grow(growth, writes);
    return other;
  }

 private:
  HeadStore(const HeadRule& settings, const StoreContext& context, const float* frequencies,
            bool quantization_deferred, std::size_t evicted, DeviceWrites& writes)
      : settings_{settings},
        context_{context},
        quantization_deferred_{quantization_deferred},
        evicted_unshared_{evicted},
        exact_{pages_of(PageKind::exact)},
        packed_{pages_of(PageKind::packed)},
        summaries_{pages_of(PageKind::summary)},
        sums_{settings.waits_for_scoring} {
    const HeadGeometry geometry{settings, context, quantization_deferred};
    const auto number = [](std::size_t n) { return static_cast<int>(std::min<std::size_t>(n, INT_MAX)); };
    view_.sinks = number(settings.sinks);
    view_.recent = number(settings.recent);
    view_.prefill_chunk_mask = settings.prefill_chunk_mask;
    view_.evicted = number(evicted);
    view_.exact_origin = number(geometry.exact_origin());
    view_.exact_ring = number(geometry.exact_ring());
    view_.set_contiguous_rows(static_cast<int>(context.head_dim), static_cast<int>(context.page_rows));
    view_.packed_ring = number(geometry.packed_ring());
    if (settings.is_quantized()) static_cast<void>(packed_widths(settings));  // kernels refuse nothing
    view_.key_encoding = settings.key_encoding;
    view_.value_encoding = settings.value_encoding;
    view_.key_per_channel = settings.key_per_channel;
    view_.key_hadamard = settings.key_hadamard;
    view_.value_hadamard = settings.value_hadamard;
    view_.key_group = number(settings.key_group);
    view_.value_group = number(settings.value_group);
    view_.residual = geometry.packs() ? number(settings.residual) : unlimited;
    view_.kivi_flush = geometry.packs() && settings.kivi_flush;
    view_.votes = settings.votes;
    view_.waits_for_scoring = settings.waits_for_scoring;
    view_.inverse_frequencies = frequencies;
    view_.rotation_limit = number(settings.sinks + settings.recent) - 1;
    view_.chunk_rows = number(settings.chunk);
    view_.budget_chunks = number(settings.chunk_rule().budget);
    view_.min_max = has_min_max_summary(settings);
    if (has_own_summary(settings)) view_.own_summary = summary_tag(settings.summary);
    if (settings.engine_pages) {
      view_.exact_row_stride = number(context.pool->engine_rows().row_stride);
      view_.exact_values_offset = static_cast<long long>(context.pool->engine_rows().values_offset);
    }
    make_selections(writes);
    if (!geometry.is_slow()) return;
    slow_.emplace(geometry.slow(), context.memory, writes.stream());
    view_.slow = slow_->device();
  }

  enum class PageKind : std::uint8_t { exact, packed, summary };

  // None yet, of one kind.
  [[nodiscard]] Pages pages_of(PageKind kind) const {
    const HeadGeometry geometry{settings_, context_, quantization_deferred_};
    const std::size_t bytes = kind == PageKind::exact    ? geometry.exact_page_bytes()
                              : kind == PageKind::packed ? geometry.packed_page_bytes()
                                                         : geometry.summary_page_bytes();
    const bool slow = geometry.is_slow() && kind == (geometry.packs() ? PageKind::packed : PageKind::exact);
    // An engine's tensor has room for exact rows alone, and for those of heads that are to be there.
    const bool in_engine = kind == PageKind::exact && settings_.engine_pages;
    if (context_.pool != nullptr && (in_engine || context_.pool->engine_rows().page_rows == 0)) {
      return {*context_.pool, slow ? std::size_t{1} : 0, bytes, context_.memory};
    }
    return {slow ? context_.slow_memory : context_.memory, bytes, context_.memory};
  }
  // Slow pages that a text which came so far has entered (as kernels/slow_rows.cuh counts them).
  [[nodiscard]] std::size_t entered_pages(const LayerState& furthest) const {
    return static_cast<std::size_t>(
        pages_come_to(view_, slow_->geometry().packed, static_cast<int>(context_.page_rows), furthest));
  }

  [[nodiscard]] std::size_t selection_bytes() const {
    if (settings_.chunk == 0) return 0;
    const std::size_t slots = context_.selection_slots;
    const std::size_t budget = settings_.chunk_rule().budget;
    return sizeof(Selections) + (3 * slots + slots * budget) * sizeof(int);
  }
  void make_selections(DeviceWrites& writes) {
    if (settings_.chunk == 0) return;
    selections_ = allocate(context_.memory, selection_bytes(), writes.stream());
    auto* numbers = reinterpret_cast<int*>(selections_.get() + sizeof(Selections));
    const auto slots = static_cast<int>(context_.selection_slots);
    auto* place = reinterpret_cast<Selections*>(selections_.get());
    writes.write(place, Selections{.latest = 0,
                                   .valid = 0,
                                   .slots = slots,
                                   .tokens = numbers,
                                   .ends = numbers + slots,
                                   .counts = numbers + 2 * slots,
                                   .chunks = numbers + 3 * slots});
    view_.selections = place;
  }
  void describe_pages() {
    view_.scores = reinterpret_cast<float*>(scores_.get());
    view_.exact_pages = exact_.table();
    view_.packed_pages = packed_.table();
    if (slow_) (slow_->geometry().packed ? view_.packed_pages : view_.exact_pages) = slow_->table();
    view_.summary_pages = summaries_.table();
    view_.sums = sums_.data();
  }

  HeadRule settings_;
  StoreContext context_;
  bool quantization_deferred_;
  std::size_t evicted_unshared_;
  bool compressed_once_ = false;
  Pages exact_;
  Pages packed_;
  Pages summaries_;
  std::optional<SlowStore> slow_;
  DeviceBuffer selections_;
  DeviceBuffer scores_;
  std::size_t scored_chunks_ = 0;
  RowSums sums_;
  std::size_t scored_ = 0;
  DeviceBuffer positions_;
  std::size_t survivors_ = 0;
  HeadView view_;
};

}  // namespace kvpolicy::gpu
