// SPDX-License-Identifier: Apache-2.0
//
// A device head's rows in the host's form. Every page is copied once; the planes that are shown point into
// the copies.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvpolicy/cuda/head_store.hpp>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/packed_pages.hpp>
#include <kvpolicy/policy/head_contents.hpp>

namespace kvpolicy::gpu {

/// One head, copied to the host. The copies are complete once `stream` has been waited for.
template <Element E>
class HeadDownload {
 public:
  /// @throws std::bad_alloc, DeviceError
  HeadDownload(const HeadStore& store, const StoreContext& context, cudaStream_t stream)
      : store_{&store},
        context_{context},
        exact_{copy(store.exact(), stream)},
        packed_{copy(store.packed(), stream)},
        summaries_{copy(store.summaries(), stream)},
        survivors_(store.survivors()) {
    if (!survivors_.empty()) {
      fetch(survivors_.data(), store.positions().get(), survivors_.size() * sizeof(long long), stream);
    }
    if (accumulates(store.settings())) {
      sums_.resize(store.sums().rows());
      fetch(sums_.data(), store.sums().data(), store.sums().bytes(), stream);
    }
    if (store.view().selections == nullptr) return;
    const auto* block = reinterpret_cast<const std::byte*>(store.view().selections);
    choices_.resize(context.selection_slots * (3 + static_cast<std::size_t>(store.view().budget_chunks)));
    fetch(choices_.data(), block + sizeof(Selections), choices_.size() * sizeof(int), stream);
  }

  /// What the head holds of the `committed` rows that it was given. `made` are the choices of its layer.
  [[nodiscard]] HeadContents contents(std::size_t committed, const HeadChoices& made) {
    const HeadView& view = store_->view();
    HeadContents all{.committed = committed};
    all.quantization_deferred = store_->is_quantization_deferred();
    all.compressed_once = store_->compressed_once();
    const std::size_t stored = committed - store_->evicted();
    all.unshared_rows = committed - store_->evicted_unshared();
    if (accumulates(store_->settings())) {
      all.accumulated = sums_;
      all.accumulated.resize(stored);
      // On the device that is any negative number.
      for (double& sum : all.accumulated) sum = sum < 0.0 ? HeadContents::unscored : sum;
    }
    const std::size_t sinks = std::min<std::size_t>(store_->settings().sinks, stored);
    const std::size_t first = std::min(store_->settings().window_rule().first_kept(stored), stored);
    positions_.resize(stored);
    for (std::size_t row = 0; row < stored; ++row) {
      positions_[row] =
          row < survivors_.size() ? survivors_[row] : static_cast<std::int64_t>(row + store_->evicted());
    }
    if (sinks > 0) show(0, sinks, false, false, all);
    unpack_pages();
    const auto keys = std::min(static_cast<std::size_t>(view.keys_end(static_cast<int>(committed))), stored);
    const auto values =
        std::min(static_cast<std::size_t>(view.values_end(static_cast<int>(committed))), stored);
    std::size_t from = std::max(first, sinks);
    for (const std::size_t cut : {std::min(keys, values), std::max(keys, values), stored}) {
      if (cut <= from) continue;
      show(from, cut, from < keys, from < values, all);
      from = cut;
    }
    show_summaries(stored, all);
    list_choices(made, all);
    return all;
  }

  /// The exact row `row` of one side, [head_dim].
  [[nodiscard]] const E* exact_row(std::size_t row, bool key) const {
    const auto slot = static_cast<std::size_t>(store_->view().exact_slot(static_cast<int>(row)));
    const std::size_t in_page = (key ? 0 : context_.page_rows) + slot % context_.page_rows;
    return reinterpret_cast<const E*>(exact_.data() + slot / context_.page_rows * exact_page_bytes()) +
           in_page * context_.head_dim;
  }

 private:
  [[nodiscard]] std::size_t exact_page_bytes() const {
    return 2 * context_.page_rows * context_.head_dim * sizeof(E);
  }
  static void fetch(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "cudaMemcpyAsync");
  }
  static std::vector<std::byte> copy(const Pages& pages, cudaStream_t stream) {
    std::vector<std::byte> bytes(pages.count() * pages.page_bytes());
    pages.copy(0, pages.count(), bytes.data(), stream);
    return bytes;
  }

  // A plane over the rows [first, last) whose pages `page(row)` says, in a table of its own.
  template <class PageOf>
  [[nodiscard]] Plane plane_of(const RowFormat& format, std::size_t first, std::size_t last,
                               std::size_t first_slot, PageOf page) {
    std::vector<const std::byte*>& table = tables_.emplace_back();
    const std::size_t in_page = first_slot % context_.page_rows;
    for (std::size_t row = first; row < last;) {
      table.push_back(page(row));
      row += context_.page_rows - (table.size() == 1 ? in_page : 0);
    }
    return {.format = format, .pages = table.data(), .page_rows = context_.page_rows, .first_row = in_page};
  }
  [[nodiscard]] Plane exact_plane(std::size_t first, std::size_t last, bool key) {
    const auto slot_of = [&](std::size_t row) {
      return static_cast<std::size_t>(store_->view().exact_slot(static_cast<int>(row)));
    };
    const std::size_t offset = key ? 0 : exact_page_bytes() / 2;
    return plane_of({.encoding = encoding_of<E>}, first, last, slot_of(first), [&](std::size_t row) {
      return exact_.data() + slot_of(row) / context_.page_rows * exact_page_bytes() + offset;
    });
  }
  [[nodiscard]] Plane packed_plane(std::size_t first, std::size_t last, bool key) {
    const PackedPages pages{store_->settings(), context_.head_dim, context_.page_rows};
    const auto slot_of = [&](std::size_t row) {
      return static_cast<std::size_t>(store_->view().packed_slot(static_cast<int>(row)));
    };
    const std::size_t bytes = pages.host_page_bytes(key);
    return plane_of(pages.format(key), first, last, slot_of(first), [&](std::size_t row) {
      return unpacked_[key ? 0 : 1].data() + slot_of(row) / context_.page_rows * bytes;
    });
  }
  // The rows [first, last), whose keys and values have codes or not.
  void show(std::size_t first, std::size_t last, bool coded_keys, bool coded_values, HeadContents& all) {
    kvpolicy::Segment rows{
        .keys = coded_keys ? packed_plane(first, last, true) : exact_plane(first, last, true),
        .values = coded_values ? packed_plane(first, last, false) : exact_plane(first, last, false),
        .rows = last - first,
        .position = static_cast<std::int64_t>(first + store_->evicted())};
    if (store_->settings().compresses) rows.positions = positions_.data() + first;
    all.rows.push_back(rows);
  }

  void unpack_pages() {
    if (packed_.empty()) return;
    const PackedPages pages{store_->settings(), context_.head_dim, context_.page_rows};
    const std::size_t count = store_->packed().count();
    for (const bool key : {true, false}) {
      std::vector<std::byte>& side = unpacked_[key ? 0 : 1];
      const std::size_t bytes = pages.host_page_bytes(key);
      side.resize(count * bytes);
      for (std::size_t i = 0; i < count; ++i) {
        pages.to_host(packed_.data() + i * pages.page_bytes(), key, side.data() + i * bytes);
      }
    }
    packed_.clear();
  }

  void show_summaries(std::size_t stored, HeadContents& all) {
    const HeadRule& rule = store_->settings();
    if (rule.chunk == 0) return;
    const std::size_t side = context_.page_rows * context_.head_dim * sizeof(E);
    const std::size_t vectors = rule.summary_vectors;
    for (std::size_t v = 0; v < vectors; ++v) {
      all.summaries.push_back(plane_of(
          {.encoding = encoding_of<E>}, 0, rule.chunk_rule().closed(stored), 0, [&](std::size_t row) {
            return summaries_.data() + (row / context_.page_rows * vectors + v) * side;
          }));
    }
  }

  void list_choices(const HeadChoices& made, HeadContents& all) const {
    const std::size_t slots = context_.selection_slots;
    const auto budget = static_cast<std::size_t>(store_->view().budget_chunks);
    const std::size_t chunk = store_->settings().chunk;
    for (std::size_t i = made.ring.valid; i-- > 0;) {
      const std::size_t slot = (made.ring.latest + slots - i) % slots;
      ChosenChunks choice{.committed = made.committed[slot], .tokens = made.tokens[slot]};
      const auto count = static_cast<std::size_t>(choices_[2 * slots + slot]);
      for (std::size_t c = 0; c < count; ++c) {
        const std::size_t row = static_cast<std::size_t>(choices_[3 * slots + slot * budget + c]) * chunk;
        auto& runs = choice.runs;
        if (!runs.empty() && runs.back().first + runs.back().rows == row) {
          runs.back().rows += chunk;
        } else {
          runs.push_back({row, chunk});
        }
      }
      all.choices.push_back(std::move(choice));
    }
  }

  const HeadStore* store_;
  StoreContext context_;
  std::vector<std::byte> exact_;
  std::vector<std::byte> packed_;
  std::vector<std::byte> summaries_;
  std::vector<long long> survivors_;
  std::vector<double> sums_;  // attention that each row got, where the head adds it up
  std::vector<int> choices_;  // tokens, ends and counts [slots], then chunks [slots, budget]
  std::array<std::vector<std::byte>, 2> unpacked_;  // keys and values, in pages of the host's layout
  std::vector<std::int64_t> positions_;
  std::vector<std::vector<const std::byte*>> tables_;
};

}  // namespace kvpolicy::gpu
