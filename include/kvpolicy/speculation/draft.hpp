// SPDX-License-Identifier: Apache-2.0
//
// A draft is code that proposes tokens. It may use a smaller model, the same model over fewer rows, or the
// text itself. A draft receives the whole text in each call and compares it with what it has read. So the
// verifier need not report which draft tokens were accepted or that the text was shortened.
#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/token_tree.hpp>
#include <kvpolicy/speculation/language_model.hpp>
#include <kvpolicy/speculation/sampling.hpp>

namespace kvpolicy {

/// A draft token: a proposed token that is not verified yet.
struct DraftToken {
  int token = 0;
  /// The distribution that the token was drawn from. The verification relies on its exact values.
  Distribution from = {};
  /// Index, among the draft tokens of a call, of the one that it continues; `text`: it continues the text.
  std::size_t parent = TokenTree::text;
  /// The level that proposed it: 0 the draft itself, 1 the draft's own draft, and so on.
  unsigned level = 0;
};

/// Draft tokens in the order in which siblings are verified; each comes after its parent.
using DraftTokens = std::vector<DraftToken>;

/// Whether each draft token continues the previous one.
[[nodiscard]] inline bool is_chain(std::span<const DraftToken> guesses) {
  for (std::size_t i = 0; i < guesses.size(); ++i) {
    if (guesses[i].parent != (i == 0 ? TokenTree::text : i - 1)) return false;
  }
  return true;
}

/// A type that proposes tokens. Requirements:
///
///     std::size_t vocabulary() const;  // 0 if it serves any vocabulary
///     void propose(std::span<const int> text, std::size_t max_guesses, const SamplingOptions&,
///                  Random&, DraftTokens& guesses);
///
/// `propose` overwrites `guesses` with 0 to `max_guesses` draft tokens that continue `text`.
/// `text` is the whole text, prompt included, and never empty; any number of its latest tokens may
/// differ from the previous call. After an error the draft must be able to serve the next call.
/// Optional:
///
///     void refresh_selection();  // the selection in the target's cache is older than the latest
///                                // prompt: the next call must select by the text's last token
///                               // prompt: the next call must select by the text's last token
template <class D>
concept Draft = requires(D& draft, const D& seen, std::span<const int> text, std::size_t max_guesses,
                         const SamplingOptions& sampling, Random& random, DraftTokens& guesses) {
  { seen.vocabulary() } -> std::convertible_to<std::size_t>;
  draft.propose(text, max_guesses, sampling, random, guesses);
};

/// Calls `refresh_selection` if the draft has it.
template <Draft D>
void refresh_selection(D& draft) {
  if constexpr (requires { draft.refresh_selection(); }) draft.refresh_selection();
}

/// A draft that proposes nothing, so decoding is token by token.
struct NoDraft {
  [[nodiscard]] static std::size_t vocabulary() { return 0; }
  static void propose(std::span<const int>, std::size_t, const SamplingOptions&, Random&,
                      DraftTokens& guesses) {
    guesses.clear();
  }
};
static_assert(Draft<NoDraft>);

namespace detail {

/// Refuses draft tokens that a model cannot read or a cache cannot take back.
/// @throws ShapeError for more draft tokens than requested, or a token outside the vocabulary
inline void check_guesses(std::span<const DraftToken> guesses, std::size_t max_guesses,
                          std::size_t vocabulary) {
  require<ShapeError>(guesses.size() <= max_guesses, "Draft: made ", guesses.size(),
                      " draft tokens, must be at most the ", max_guesses, " that were requested");
  for (const DraftToken& guess : guesses) check_token("Draft", guess.token, vocabulary);
}

}  // namespace detail

}  // namespace kvpolicy
