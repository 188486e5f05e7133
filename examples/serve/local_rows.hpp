// SPDX-License-Identifier: Apache-2.0
//
// The rows of this process. Where several processes have a part of each text's heads (rows_over_ranks.hpp), all make
// the same calls in the same order, and whatever depends on memory is decided together: a text comes in where there is
// room for it on every rank, and a prefix goes from all of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include <kvpolicy/cache/admission.hpp>
#include <kvpolicy/cache/swapped_cache.hpp>
#include <kvpolicy/memory/page_pool.hpp>
#include <reference_model/parallel/communicator.hpp>

#include "serve/rows.hpp"
#include "tool_plan.hpp"

namespace kvpolicy::serve {

class LocalRows final : public Rows {
 public:
  /// `ranks`: those that make the same calls; none: this process is alone. All must outlive it.
  /// @throws ConfigError
  LocalRows(ServedModel& model, const RowsOptions& options, reference::Communicator* ranks = nullptr);

  [[nodiscard]] std::size_t peak_bytes(const Plan& plan, std::size_t prompt,
                                       std::size_t max_new) const override;
  std::optional<std::size_t> begin(const NewText& text) override;
  bool move_out(std::uint64_t id) override;
  bool bring_back(std::uint64_t id) override;
  std::size_t end(std::uint64_t id) override;
  std::vector<reference::BatchedRead> read(std::span<const TextStep> steps) override;
  void compress(std::uint64_t id) override;
  bool keep(std::uint64_t id) override;
  void make_room() override { make_room(0); }
  void tick() override;

  /// RowsOptions::save_prefixes; 0 without it. @throws what it throws
  std::size_t save();
  [[nodiscard]] const RowsOptions& options() const { return options_; }

  [[nodiscard]] Room room() override;
  [[nodiscard]] std::size_t tokens(std::uint64_t id) const override;
  [[nodiscard]] std::size_t bytes(std::uint64_t id) const override;
  [[nodiscard]] std::size_t shared_bytes(std::uint64_t id) const override;
  [[nodiscard]] const LimitedMemory& memory() const override { return memory_; }
  [[nodiscard]] Prefixes& prefixes() override { return prefixes_; }

 private:
  using Waiting = SwappedCache<bfloat16, cpu::Engine<>>;
  struct Text {
    std::shared_ptr<const Plan> plan;  // of this process's heads
    tools::PlanNeeds needs;
    TextPromise promise;
    bool has_prefixes = true;
    std::vector<int> read = {};       // tokens
    std::optional<Cache> cache = {};  // while it runs
    std::optional<Waiting> out = {};  // after it was moved out
    std::size_t bytes_back = 0;       // that it takes at most when it comes back
  };

  [[nodiscard]] bool everywhere(bool own) const;
  [[nodiscard]] bool may_have_prefixes(const Plan& whole, const Plan& own);
  void bring_prefixes_back(const Plan& plan);
  [[nodiscard]] Text& known(std::uint64_t id);
  [[nodiscard]] const Text& known(std::uint64_t id) const;
  [[nodiscard]] bool move_away(Text& text);
  [[nodiscard]] bool move_in(Text& text);
  [[nodiscard]] std::size_t growth() const;
  [[nodiscard]] bool fits(std::size_t more) const;
  void make_room(std::size_t more);
  [[nodiscard]] bool evict(std::size_t bytes);
  [[nodiscard]] bool begin_cache(Text& text, std::span<const int> tokens, std::size_t& cached);

  ServedModel& model_;
  RowsOptions options_;
  reference::Communicator* ranks_;
  LimitedMemory memory_;
  LimitedMemory swap_memory_;
  PagePool pool_;
  PagePool swap_pool_;
  CacheOptions cache_options_;
  Prefixes prefixes_;
  std::unordered_map<std::uint64_t, Text> texts_;
  // Of ranks, by digests: the plan whose prefixes those of a part of a plan are, and whether a plan may have any.
  std::unordered_map<std::uint64_t, std::uint64_t> plan_of_part_;
  std::unordered_map<std::uint64_t, bool> may_have_prefixes_;
};

}  // namespace kvpolicy::serve
