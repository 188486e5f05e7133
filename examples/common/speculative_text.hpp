// SPDX-License-Identifier: Apache-2.0
//
// One text that the reference model decodes by guesses, with a draft that is named at run time.
// What decodes, and what it promises, is kvpolicy/speculation/decoder.hpp; this puts it together
// for the tools and is compiled once, in speculative_text.cpp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
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

/// Who guesses what the target is going to say.
enum class Structure : std::uint8_t {
  triforce,   ///< a small model over a streaming cache, corrected by the target over selected rows
  self,       ///< the target over selected rows
  draft,      ///< a small model over a streaming cache
  streaming,  ///< the target over a streaming cache
  ngram,      ///< the text: what followed the latest tokens when they stood there before
  tree,       ///< a small model, several continuations at once
  plain       ///< nobody: token by token
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
/// Whether it needs a second, smaller model.
[[nodiscard]] bool needs_small_model(Structure structure);

struct SpeculationSetup {
  Structure structure = Structure::triforce;
  /// Rows of the target's cache are chosen in chunks, as many as the budget has. The defaults are
  /// those of 12 tried (mean or min/max keys, chunks of 8 or 16, budgets of 256 to 1,024) that
  /// accepted most on the tool's own text: they flatter it. The paper's are mean keys, chunks of 8.
  std::size_t chunk = 16;
  std::size_t budget = 1024;  ///< a multiple of chunk
  bool min_max = true;
  std::size_t bits = 0;          ///< of the target's rows; 0 keeps bfloat16
  std::size_t sinks = 16;        ///< of a streaming cache
  std::size_t recent = 240;  ///< of a streaming cache, besides the sinks
  std::size_t tree_nodes = 16;
  SpeculationOptions options = {};
  SelectedDraftOptions middle = {};  ///< of the target over selected rows
};

/// The plan of the target's cache.
[[nodiscard]] HeadPlan<bfloat16> target_plan(const ModelShape& shape, const SpeculationSetup& setup);

/// What one level did: the target first, then who guesses for it, ...
struct LevelReport {
  std::string name;          ///< "target", "selected", "draft"
  std::size_t passes = 0;    ///< of its model, or calls of a draft that is no model
  std::size_t judged = 0;    ///< places where it judged guesses; 0 if it only guesses
  std::size_t accepted = 0;  ///< of them, where a guess stayed
  std::size_t tokens = 0;    ///< that it handed to the level above
  double seconds = 0.0;      ///< its own

  /// NaN if it judged nothing.
  [[nodiscard]] double acceptance() const;
  [[nodiscard]] double tokens_per_pass() const;
};

/// Not synchronised. The models must outlive it.
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

  /// Appends a prompt, or the next turn of a conversation, and reads it, the draft too. A text that
  /// had ended goes on.
  void read(std::span<const int> tokens, const Report& report = {});

  /// Lets a text go on that has ended.
  void reopen();

  /// @throws as SpeculativeDecoder::step
  DecodedStep step(std::size_t most = static_cast<std::size_t>(-1));

  /// The same text, from here on decoded in another way or by itself; rows that are full pages are
  /// shared. Cheap directly behind `read`, otherwise the draft reads the text anew. `setup` may
  /// differ in structure and options, not in what the target's cache is.
  [[nodiscard]] std::unique_ptr<SpeculativeText> fork(const SpeculationSetup& setup) const;

  [[nodiscard]] const SpeculationSetup& setup() const;
  [[nodiscard]] std::span<const int> text() const;
  [[nodiscard]] std::vector<LevelReport> levels() const;
  /// DraftTokens that the target has judged so far.
  [[nodiscard]] std::size_t guessed() const;
  /// Of NewToken::level: "target", "selected", "draft".
  [[nodiscard]] std::vector<std::string> proposers() const;
  [[nodiscard]] std::size_t refreshes() const;
  [[nodiscard]] std::size_t bytes() const;        ///< of the target's cache
  [[nodiscard]] std::size_t draft_bytes() const;  ///< of the draft's
  /// That all passes since the text began have read, by what the next one of each would.
  [[nodiscard]] std::size_t bytes_read() const;

 private:
  struct Parts;
  explicit SpeculativeText(std::unique_ptr<Parts> parts);

  std::unique_ptr<Parts> parts_;
};

/// The folder of the small model that ships beside a model, by its name: "keyfinder-draft" for
/// "keyfinder".
[[nodiscard]] std::string draft_folder_of(const std::string& model_folder);

/// @throws FormatError that says what is missing unless there is a model in `folder`.
void require_draft_folder(const std::string& folder);

}  // namespace kvpolicy::tools
