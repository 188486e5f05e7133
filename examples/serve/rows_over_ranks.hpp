// SPDX-License-Identifier: Apache-2.0
//
// Rows of several processes, each of which has some heads of every text. Rank 0 schedules: it says each call to the
// others before it makes it, and they make it too (`follow`). So the scheduler knows of one process, and what depends
// on memory is decided by all in local_rows.hpp.
//
//   LocalRows own{model, options, &ranks};
//   if (ranks.rank() > 0) return follow(ranks, own);
//   RowsOverRanks rows{ranks, own, model.shards()};
//   Scheduler scheduler{model, rows, options};
//   ...
//   rows.stop();
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <kvpolicy/plan/shards.hpp>
#include <reference_model/parallel/communicator.hpp>

#include "serve/local_rows.hpp"
#include "serve/rows.hpp"

namespace kvpolicy::serve {

/// Makes the calls that rank 0 says, until it says that it stops.
/// @throws CommunicationError if a rank is gone, or says what this one does not understand
void follow(reference::Communicator& ranks, LocalRows& rows);

/// Rank 0's. After a CommunicationError texts can be ended, and every other call throws another one.
class RowsOverRanks final : public Rows {
 public:
  /// All must outlive it. @throws ConfigError, on every rank, if ranks have other options than rank 0
  RowsOverRanks(reference::Communicator& ranks, LocalRows& own, const Shards& shards);
  /// Ends the others' `follow`. @throws CommunicationError
  void stop();

  [[nodiscard]] std::size_t peak_bytes(const Plan& plan, std::size_t prompt,
                                       std::size_t max_new) const override;
  std::optional<std::size_t> begin(const NewText& text) override;
  bool move_out(std::uint64_t id) override;
  bool bring_back(std::uint64_t id) override;
  std::size_t end(std::uint64_t id) override;
  std::vector<reference::BatchedRead> read(std::span<const TextStep> steps) override;
  void compress(std::uint64_t id) override;
  bool keep(std::uint64_t id) override;
  void make_room() override;
  void tick() override;
  /// Saves the prefixes of every rank (RowsOptions::save_prefixes). Returns how many rank 0 has saved.
  std::size_t save();

  [[nodiscard]] Room room() override;
  [[nodiscard]] std::size_t tokens(std::uint64_t id) const override { return own_.tokens(id); }
  [[nodiscard]] std::size_t bytes(std::uint64_t id) const override { return own_.bytes(id); }
  [[nodiscard]] std::size_t shared_bytes(std::uint64_t id) const override { return own_.shared_bytes(id); }
  [[nodiscard]] const LimitedMemory& memory() const override { return own_.memory(); }
  [[nodiscard]] Prefixes& prefixes() override { return own_.prefixes(); }

 private:
  class Words;
  void say(const Words& words);
  std::uint64_t number_of(const std::shared_ptr<const Plan>& plan);

  reference::Communicator& ranks_;
  LocalRows& own_;
  const Shards& shards_;
  std::vector<std::shared_ptr<const Plan>> plans_;  // what the others know, by number
  std::size_t next_plan_ = 0;
  std::chrono::steady_clock::time_point said_, saved_;
  std::size_t saved_kept_ = 0;  // prefixes that had been kept when they were saved
  bool is_broken_ = false;
};

}  // namespace kvpolicy::serve
