// SPDX-License-Identifier: Apache-2.0
//
// What proposes tokens: a smaller model, the same model over fewer rows, or the text itself. A
// draft is told the whole text each time and keeps up by itself, so whoever judges its guesses owes
// it nothing: not which stayed, not when the text was shortened.
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

/// One guess.
struct Guess {
  int token = 0;
  /// What the token was drawn from. Whoever judges it relies on that to the last digit.
  Distribution from = {};
  /// The guess that it continues, by its place among the guesses of a call; `text`: the text.
  std::size_t parent = TokenTree::text;
  /// Who it comes from: 0 for the draft itself, one more for each draft behind it.
  unsigned level = 0;
};

/// In the order in which siblings are judged; a guess stands behind its parent.
using Guesses = std::vector<Guess>;

/// Whether each guess continues the one before it.
[[nodiscard]] inline bool is_chain(std::span<const Guess> guesses) {
  for (std::size_t i = 0; i < guesses.size(); ++i) {
    if (guesses[i].parent != (i == 0 ? TokenTree::text : i - 1)) return false;
  }
  return true;
}

/// Requirements:
///
///     std::size_t vocabulary() const;     // 0 if it serves any
///     void propose(std::span<const int> text, std::size_t max_guesses, const SamplingOptions&, Random&,
///                  Guesses& guesses);
///
/// `propose` makes at most `max_guesses` guesses, none if it has none, about what follows `text`: the
/// whole text, prompt included, of which any number of the latest tokens may differ from the call
/// before. `text` is never empty. `guesses` is overwritten.
/// What it throws leaves it able to go on with the next call. Optional:
///
///     void choose_anew();       // what the target's cache has selected was chosen before the latest
///                               // prompt: the next call has it chosen by the text's last token
template <class D>
concept Draft = requires(D& draft, const D& seen, std::span<const int> text, std::size_t max_guesses,
                         const SamplingOptions& sampling, Random& random, Guesses& guesses) {
  { seen.vocabulary() } -> std::convertible_to<std::size_t>;
  draft.propose(text, max_guesses, sampling, random, guesses);
};

/// Says so to a draft that wants to know it.
template <Draft D>
void choose_anew(D& draft) {
  if constexpr (requires { draft.choose_anew(); }) draft.choose_anew();
}

/// Guesses nothing: whoever judges decodes token by token.
struct NoDraft {
  [[nodiscard]] static std::size_t vocabulary() { return 0; }
  static void propose(std::span<const int>, std::size_t, const SamplingOptions&, Random&,
                      Guesses& guesses) {
    guesses.clear();
  }
};
static_assert(Draft<NoDraft>);

namespace detail {

/// Refuses what a model cannot read, or a cache could not take back.
/// @throws ShapeError for more guesses than were asked for, or a token outside the vocabulary
inline void check_guesses(std::span<const Guess> guesses, std::size_t max_guesses,
                          std::size_t vocabulary) {
  require<ShapeError>(guesses.size() <= max_guesses, "Draft: made ", guesses.size(),
                      " guesses, must be at most the ", max_guesses, " that it was asked for");
  for (const Guess& guess : guesses) check_token("Draft", guess.token, vocabulary);
}

}  // namespace detail

}  // namespace kvpolicy
