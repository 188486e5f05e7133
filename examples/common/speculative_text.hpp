// SPDX-License-Identifier: Apache-2.0
//
// One text that the reference model decodes speculatively, with a draft chosen at run time. The
// decoder and its guarantees are those of kvpolicy/speculation/decoder.hpp; this class connects it
// for the tools and is compiled once, in speculative_text.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/speculation/decoder.hpp>
#include <kvpolicy/speculation/selected_draft.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::tools {

/// The kinds of drafts that propose tokens to the target.
enum class Structure : std::uint8_t {
  triforce,   ///< a small model over a streaming cache, verified by the target over selected rows
  self,       ///< the target over selected rows
  halves,     ///< the target over every row, at the upper 4 of its 8 bits
  draft,      ///< a small model over a streaming cache
  streaming,  ///< the target over a streaming cache
  ngram,      ///< the text itself: what followed earlier occurrences of the latest tokens
  tree,       ///< a small model that proposes several continuations at once
  plain       ///< no draft: token by token
};
struct NamedStructure {
  const char* name;
  Structure structure;
  const char* about;
};
[[nodiscard]] std::span<const NamedStructure> structures();
[[nodiscard]] const NamedStructure& named(Structure structure);
/// @throws ConfigError that lists the names
[[nodiscard]] Structure structure_named(const std::string& name);
/// Whether the structure needs a second, smaller model.
[[nodiscard]] bool needs_small_model(Structure structure);

struct SpeculationSetup {
  Structure structure = Structure::triforce;
  /// The target's cache selects chunks of this many rows, up to the budget. Of 12 settings tried
  /// (mean or min/max keys, chunks of 8 or 16, budgets of 256 to 1,024) the defaults accepted most
  /// draft tokens on the tool's own text, so its results flatter them. The paper has mean keys and
  /// chunks of 8.
  std::size_t chunk = 16;
  std::size_t budget = 1024;  ///< a multiple of chunk
  bool min_max = true;
  std::size_t bits = 0;      ///< of the target's rows; 0 keeps bfloat16
  bool halves = false;       ///< the target's rows have 8 bits in halves; Structure::halves sets it
  std::size_t sinks = 16;    ///< first rows that a streaming cache keeps
  std::size_t recent = 240;  ///< latest rows of a streaming cache, besides the sinks
  /// What the draft of Structure::streaming keeps instead. Nothing compresses its rows, so budgets
  /// of its heads have no effect.
  std::optional<HeadPlan<bfloat16>> draft_plan = {};
  std::size_t tree_nodes = 16;
  SpeculationOptions options = {};
  SelectedDraftOptions middle = {};  ///< the target over selected rows, or over halves of codes
};

/// The plan of the target's cache.
[[nodiscard]] HeadPlan<bfloat16> target_plan(const ModelShape& shape, const SpeculationSetup& setup);

/// The work of one level. Reports start with the target, followed by its draft, that one's draft, ...
struct LevelReport {
  std::string name;               ///< "target", "selected", "upper half", "draft"
  std::size_t passes = 0;         ///< of its model, or calls of a draft that is no model
  std::size_t judged = 0;         ///< draft tokens that it verified; 0 if it only proposes
  std::size_t accepted = 0;       ///< draft tokens of these that it accepted
  std::size_t tokens = 0;         ///< tokens that it handed to the level above
  double seconds = 0.0;           ///< without the levels below
  std::optional<Read> read = {};  ///< what it reads of the target's cache; none for a draft of its own

  /// NaN if it verified nothing.
  [[nodiscard]] double acceptance() const;
  [[nodiscard]] double tokens_per_pass() const;
};

/// Not thread-safe. The models must outlive it.
class SpeculativeText {
 public:
  using Report = std::function<void(std::size_t done, std::size_t total)>;

  /// `small` may be null where the structure does not need it.
  /// @throws ConfigError, ShapeError for a setup that does not work or does not fit the models
  SpeculativeText(const reference::Llama& model, const reference::Llama* small,
                  const SpeculationSetup& setup);
  SpeculativeText(const SpeculativeText&) = delete;
  SpeculativeText& operator=(const SpeculativeText&) = delete;
  ~SpeculativeText();

  /// Appends a prompt, or the next turn of a conversation, and reads it with the target and the
  /// draft. A text that had ended can continue.
  void read(std::span<const int> tokens, const Report& report = {});

  /// Lets a text continue that has ended.
  void reopen();

  /// @throws as SpeculativeDecoder::step
  DecodedStep step(std::size_t most = static_cast<std::size_t>(-1));

  /// A copy of the text that is decoded with `setup` from here on. Where both setups have the same
  /// target's cache, full pages are shared; otherwise the other one takes over the rows, which must not
  /// be quantised (KvCache::fork_as). A draft that is the target itself takes over the target's rows
  /// too, if it can; other drafts are forked directly after `read`, and later read the text again.
  /// Room for draft tokens stays that of this text's options.
  /// @throws as KvCache::fork_as
  [[nodiscard]] std::unique_ptr<SpeculativeText> fork(const SpeculationSetup& setup) const;

  [[nodiscard]] const SpeculationSetup& setup() const;
  [[nodiscard]] std::span<const int> text() const;
  [[nodiscard]] std::vector<LevelReport> levels() const;
  /// Draft tokens that the target has verified so far.
  [[nodiscard]] std::size_t guessed() const;
  /// Names for NewToken::level: "target", "selected", "upper half", "draft".
  [[nodiscard]] std::vector<std::string> proposers() const;
  [[nodiscard]] std::size_t refreshes() const;
  [[nodiscard]] std::size_t bytes() const;        ///< of the target's cache
  [[nodiscard]] std::size_t draft_bytes() const;  ///< of the draft's
  /// Bytes that all passes since the text began have read, estimated by the next pass of each
  /// model.
  [[nodiscard]] std::size_t bytes_read() const;

 private:
  struct Parts;
  explicit SpeculativeText(std::unique_ptr<Parts> parts);

  std::unique_ptr<Parts> parts_;
};

/// The folder of the small model that ships with a model: "keyfinder-draft" for "keyfinder".
[[nodiscard]] std::string draft_folder_of(const std::string& model_folder);

/// @throws FormatError that says what is missing, unless `folder` holds a model
void require_draft_folder(const std::string& folder);

}  // namespace kvpolicy::tools
