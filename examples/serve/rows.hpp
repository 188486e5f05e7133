// SPDX-License-Identifier: Apache-2.0
//
// Where the rows of texts are: of those that run, of those that were moved out, and of prefixes. The scheduler says
// what becomes of a text, this whether there is room. local_rows.hpp has the rows of one process, rows_over_ranks.hpp
// those of several.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <kvpolicy/cache/prefix_cache.hpp>
#include <kvpolicy/memory/limited_memory.hpp>
#include <reference_model/language_model.hpp>

#include "serve/served_model.hpp"

namespace kvpolicy::serve {

using Prefixes = PrefixCache<bfloat16, cpu::Engine<>>;

struct RowsOptions {
  std::size_t memory = std::size_t{1} << 30;       ///< bytes of all rows in fast memory
  std::size_t swap_memory = std::size_t{4} << 30;  ///< bytes of rows that wait; 0: nothing is moved out
  std::pmr::memory_resource* swap_to = std::pmr::get_default_resource();
  std::size_t page_rows = 64;
  /// Brings back what is known of a plan from elsewhere (PrefixFolder), and returns whether there was anything. Called
  /// by the thread that steps, before prefixes of the plan are looked for.
  std::function<bool(Prefixes&, const Plan&)> bring_prefixes_back;
  /// Keeps what others have saved meanwhile, and returns whether there was anything. Called between steps.
  std::function<bool(Prefixes&)> take_prefixes_in;
  /// Saves prefixes where they can be brought back from, and returns their number.
  std::function<std::size_t(Prefixes&)> save_prefixes;
  std::chrono::seconds save_every{0};  ///< over ranks, which save at one time; 0: not by time
  /// Is given a line for the operator.
  std::function<void(const std::string&)> tell = [](const std::string&) {};

  /// @throws ConfigError
  void validate() const;
};

/// A text that is to be read and written.
struct NewText {
  std::uint64_t id = 0;
  std::shared_ptr<const Plan> plan;
  std::span<const int> prompt;
  std::size_t max_new = 0;
};

/// What one text reads in a step.
struct TextStep {
  std::uint64_t id = 0;
  std::span<const int> tokens;
  bool wants_logits = false;  ///< of its last token
  bool selects = false;       ///< as StepCall
};

/// Bytes, of the process that has least room.
struct Room {
  std::size_t live = 0;         ///< in fast memory
  std::size_t promised = 0;     ///< that running texts may take yet
  std::size_t prefix_only = 0;  ///< of prefixes that no running text shares
  std::size_t swapped = 0;
};

/// A text is known by its number from `begin` to `end`. `peak_bytes` may be called by any thread, the others by one.
class Rows {
 public:
  Rows() = default;
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  virtual ~Rows() = default;

  /// Bytes that a text of this prompt and answer takes at most, where it takes most.
  /// @throws CapacityError, ConfigError for a plan that cannot be served
  [[nodiscard]] virtual std::size_t peak_bytes(const Plan& plan, std::size_t prompt,
                                               std::size_t max_new) const = 0;

  /// Lets a text in, with the longest prefix that is known of it, if all that it may take yet is free. Returns how many
  /// tokens of it are read; nothing if there is no room, and the text is not known then.
  virtual std::optional<std::size_t> begin(const NewText& text) = 0;
  /// Moves a running text out. False if there is no room for it there. @throws StorageError if its rows are lost: then
  /// the text must be ended
  virtual bool move_out(std::uint64_t id) = 0;
  /// Moves it back in if all that it may take yet is free. @throws StorageError if its rows cannot be read: then the
  /// text must be ended
  virtual bool bring_back(std::uint64_t id) = 0;
  /// Forgets a text; one that is not known too. Returns the bytes that its cache held, of all processes.
  virtual std::size_t end(std::uint64_t id) = 0;

  /// The texts read tokens that follow theirs. A text whose result has an error must be ended.
  virtual std::vector<reference::BatchedRead> read(std::span<const TextStep> steps) = 0;
  /// Heads with a budget drop rows. @throws std::bad_alloc: then the text must be ended
  virtual void compress(std::uint64_t id) = 0;
  /// Keeps what a text has read as a prefix, if there is room for what that takes of its own; others that are less
  /// recently used go for it. Returns whether it is new.
  virtual bool keep(std::uint64_t id) = 0;
  /// Lets prefixes go until all that the running texts may take is free.
  virtual void make_room() = 0;
  /// Between steps, also while there is nothing to do.
  virtual void tick() = 0;

  [[nodiscard]] virtual Room room() = 0;
  // Of this process:
  [[nodiscard]] virtual std::size_t tokens(std::uint64_t id) const = 0;
  [[nodiscard]] virtual std::size_t bytes(std::uint64_t id) const = 0;
  [[nodiscard]] virtual std::size_t shared_bytes(std::uint64_t id) const = 0;
  [[nodiscard]] virtual const LimitedMemory& memory() const = 0;
  /// For who saves and loads them while nothing is stepped, and for views.
  [[nodiscard]] virtual Prefixes& prefixes() = 0;
};

}  // namespace kvpolicy::serve
