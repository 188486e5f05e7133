// SPDX-License-Identifier: Apache-2.0
//
// How many pages of each kind a head needs on the device for a text of a given length, and where its rows
// stand in them: plain arithmetic, which asks for nothing.
#pragma once

#include <algorithm>
#include <cstddef>

#include <kvpolicy/cuda/kernels/head.cuh>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/served_rule.hpp>
#include <kvpolicy/cuda/slow_store.hpp>
#include <kvpolicy/memory/page_pool.hpp>

namespace kvpolicy::gpu {

/// What all heads of a cache have in common.
struct StoreContext {
  std::size_t head_dim = 0;
  std::size_t page_rows = 64;
  std::size_t tail_rows = 1;  ///< rows that may be taken back or wait for their `attend`
  std::size_t selection_slots = 2;
  MemoryResource* memory = nullptr;
  PagePool* pool = nullptr;      ///< or null: pages are asked of `memory` and `slow_memory`
  bool has_slow_memory = false;  ///< else all rows are on the device
  MemoryResource* slow_memory = nullptr;
  std::size_t latest_rows = 0;
  std::size_t max_tokens = 0;
};

/// How many pages of each kind a head needs, and how its slots are laid out.
class HeadGeometry {
 public:
  /// `quantization_deferred`: rows stay exact until the first compression.
  HeadGeometry(const HeadRule& settings, const StoreContext& context, bool quantization_deferred)
      : settings_{settings}, context_{context}, quantization_deferred_{quantization_deferred} {}

  [[nodiscard]] bool packs() const { return settings_.is_quantized() && !quantization_deferred_; }
  /// Whether rows are in slow memory: of a head that quantises the packed ones, else all.
  [[nodiscard]] bool is_slow() const { return context_.has_slow_memory && settings_.keeps_every_row(); }
  [[nodiscard]] std::size_t exact_origin() const { return up(settings_.sinks); }
  /// Slots of the ring of exact rows; 0 where they lie in a line.
  [[nodiscard]] std::size_t exact_ring() const {
    if (packs()) return up(settings_.residual + quantized_together + context_.tail_rows);
    return settings_.recent > 0 ? up(settings_.recent + context_.tail_rows) : 0;
  }
  [[nodiscard]] std::size_t packed_ring() const {
    return settings_.recent > 0 ? up(settings_.recent + context_.tail_rows + quantized_together) : 0;
  }

  [[nodiscard]] std::size_t exact_pages(std::size_t rows) const {
    if (rows <= settings_.sinks) return up(rows) / context_.page_rows;
    const std::size_t main = up(rows - settings_.sinks);
    const std::size_t ring = exact_ring();
    return (exact_origin() + (ring > 0 ? std::min(main, ring) : main)) / context_.page_rows;
  }
  [[nodiscard]] std::size_t packed_pages(std::size_t rows) const {
    if (!packs()) return 0;
    // The kernels quantise a block of rows at a time, keys and values together.
    const ResidualRule<std::size_t> rule{settings_.residual, quantized_together};
    const std::size_t besides = rows - std::min(rows, settings_.sinks);
    const ResidualRule<std::size_t> flush{settings_.residual, 1, true};
    const std::size_t main =
        up(std::max(rule.quantized(besides), settings_.kivi_flush ? flush.quantized(besides) : 0));
    const std::size_t ring = packed_ring();
    return (ring > 0 ? std::min(main, ring) : main) / context_.page_rows;
  }
  [[nodiscard]] std::size_t summary_pages(std::size_t rows) const {
    return up(closed_chunks(rows)) / context_.page_rows;
  }

  [[nodiscard]] std::size_t closed_chunks(std::size_t rows) const {
    return settings_.chunk == 0 ? 0 : settings_.chunk_rule().closed(rows);
  }

  [[nodiscard]] std::size_t exact_page_bytes() const {
    return 2 * context_.page_rows * context_.head_dim * 2;
  }
  [[nodiscard]] std::size_t packed_page_bytes() const {
    if (!settings_.is_quantized()) return 0;
    const PackedLayout layout{packed_widths(settings_),
                              static_cast<int>(context_.head_dim),
                              static_cast<int>(context_.page_rows),
                              settings_.key_per_channel,
                              static_cast<int>(settings_.key_group),
                              static_cast<int>(settings_.value_group)};
    return static_cast<std::size_t>(layout.page_bytes);
  }
  [[nodiscard]] std::size_t summary_page_bytes() const {
    return settings_.summary_vectors * context_.page_rows * context_.head_dim * 2;
  }
  [[nodiscard]] std::size_t bytes(std::size_t rows) const {
    return exact_pages(rows) * exact_page_bytes() + packed_pages(rows) * packed_page_bytes() +
           summary_pages(rows) * summary_page_bytes() + (is_slow() ? slow().bytes() : 0);
  }
  // ---- of a head in slow memory
  [[nodiscard]] std::size_t slow_pages(std::size_t rows) const {
    return packs() ? packed_pages(rows) : exact_pages(rows);
  }
  [[nodiscard]] std::size_t slow_bytes(std::size_t rows) const {
    return is_slow() ? slow_pages(rows) * slow().page_bytes : 0;
  }
  [[nodiscard]] SlowGeometry slow() const {
    SlowGeometry slow{.packed = packs(),
                      .page_bytes = packs() ? packed_page_bytes() : exact_page_bytes(),
                      .page_rows = context_.page_rows};
    // Rows that may be taken back are never far: what is staged is never written again.
    slow.latest_pages =
        up(std::max(context_.latest_rows, context_.tail_rows) + rows_written_twice()) / context_.page_rows +
        1;
    if (settings_.chunk == 0) return slow;
    slow.budget_chunks = settings_.chunk_rule().budget;
    std::size_t rows = slow.budget_chunks * settings_.chunk;
    if (context_.max_tokens > 0) rows = std::min(rows, context_.max_tokens);
    slow.chosen_pages = slow.shift_pages = up(rows) / context_.page_rows;
    // Rows keep their slots in the ring of exact rows whatever they are called.
    const std::size_t ring = exact_ring() / context_.page_rows;
    if (ring > 0) slow.shift_pages = (slow.shift_pages + ring - 1) / ring * ring;
    return slow;
  }

  [[nodiscard]] static std::size_t pages_of(std::size_t rows, std::size_t page_rows) {
    return (rows + page_rows - 1) / page_rows;
  }
  /// Rows whose keys go to packed pages some time before their values.
  [[nodiscard]] std::size_t rows_written_twice() const {
    return packs() && settings_.kivi_flush ? settings_.residual + quantized_together : 0;
  }

 private:
  [[nodiscard]] std::size_t up(std::size_t rows) const {
    return (rows + context_.page_rows - 1) / context_.page_rows * context_.page_rows;
  }

  HeadRule settings_;
  StoreContext context_;
  bool quantization_deferred_;
};

}  // namespace kvpolicy::gpu
