// SPDX-License-Identifier: Apache-2.0
//
// A model that proposes several continuations at once, as a tree of a fixed shape: Sequoia
// (arXiv:2402.12374). Siblings are drawn without replacement, so no draft token repeats a token that was
// refused already. The tree grows level by level, with one pass of the model for each level.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/token_tree.hpp>
#include <kvpolicy/speculation/draft.hpp>
#include <kvpolicy/speculation/language_model.hpp>
#include <kvpolicy/speculation/model_draft.hpp>

namespace kvpolicy {

/// A Draft whose tokens form a tree. Model and cache must outlive it, and nothing else may write to the
/// cache. The cache must be able to take back as many rows as the tree has nodes. Not synchronised.
template <class Model, TentativeCache Cache>
  requires LanguageModel<Model, Cache>
class TreeDraft {
 public:
  using Options = ModelDraftOptions;

  /// `shape`, which tree_shape.hpp can make, must list its nodes level by level. A call that may make fewer
  /// draft tokens uses its first nodes. `read` are the tokens that the cache has read already.
  /// @throws ConfigError for a shape without nodes or not level by level
  TreeDraft(Model& model, Cache& cache, TokenTree shape, const Options& options = {},
            std::span<const int> read = {})
      : reader_{model, cache, options.chunk, read}, shape_{std::move(shape)} {
    require(!shape_.empty(), "TreeDraft: the shape has no nodes, must have at least 1");
    for (std::size_t node = 1; node < shape_.size(); ++node) {
      require(shape_.depth(node) >= shape_.depth(node - 1), "TreeDraft: node ", node, " at depth ",
              shape_.depth(node), " comes after one at depth ", shape_.depth(node - 1),
              ", must come level by level");
    }
  }

  [[nodiscard]] std::size_t vocabulary() const { return reader_.model().vocabulary(); }
  [[nodiscard]] const TokenTree& shape() const { return shape_; }
  [[nodiscard]] const Cache& cache() const { return reader_.cache(); }

  void propose(std::span<const int> text, std::size_t max_guesses, const SamplingOptions& sampling,
               Random& random, DraftTokens& guesses) {
    guesses.clear();
    if (max_guesses == 0) return;
    settle(text);
    max_guesses = std::min(max_guesses, shape_.size());
    guess_of_.assign(max_guesses, none);
    std::vector<float> logits = reader_.follow(text);
    for (std::size_t first = 0, last = 0; first < max_guesses; first = last) {
      while (last < max_guesses && shape_.depth(last) == shape_.depth(first)) ++last;
      const std::vector<std::size_t> parents = parents_of(first, last);
      if (parents.empty()) return;
      if (first > 0) logits = read_nodes(parents, guesses);
      const std::size_t vocabulary = logits.size() / parents.size();
      for (std::size_t i = 0; i < parents.size(); ++i) {
        draw_children(parents[i], std::span<const float>{logits}.subspan(i * vocabulary, vocabulary), first,
                      last, sampling, random, guesses);
      }
    }
  }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);

  // The parents of the nodes [first, last) of a level, as far as a draft token was made for them.
  [[nodiscard]] std::vector<std::size_t> parents_of(std::size_t first, std::size_t last) const {
    std::vector<std::size_t> parents;
    for (std::size_t node = first; node < last; ++node) {
      const std::size_t parent = shape_.parent(node);
      const bool guessed = parent == TokenTree::text || guess_of_[parent] != none;
      if (guessed && std::ranges::find(parents, parent) == parents.end()) parents.push_back(parent);
    }
    return parents;
  }

  // Draws draft tokens for the children of `parent` among the nodes [first, last). A vocabulary may have
  // fewer tokens than a node has children.
  void draw_children(std::size_t parent, std::span<const float> logits, std::size_t first, std::size_t last,
                     const SamplingOptions& sampling, Random& random, DraftTokens& guesses) {
    Distribution from = distribution_of(logits, sampling);
    std::vector<int> taken;
    for (std::size_t node = first; node < last; ++node) {
      if (shape_.parent(node) != parent) continue;
      // If the distribution has no token left (greedy sampling has only one), the likeliest other token is
      // the best draft token, and it is drawn with probability 1.
      if (from.empty()) from = likeliest_but(logits, taken);
      if (from.empty()) return;
      const int token = from.draw(random.uniform());
      guess_of_[node] = guesses.size();
      guesses.push_back({token, from, parent == TokenTree::text ? TokenTree::text : guess_of_[parent]});
      from = from.without(token);
      taken.push_back(token);
    }
  }

  static Distribution likeliest_but(std::span<const float> logits, std::span<const int> taken) {
    std::size_t best = none;
    for (std::size_t token = 0; token < logits.size(); ++token) {
      if (best != none && !(logits[token] > logits[best])) continue;
      if (std::ranges::find(taken, static_cast<int>(token)) == taken.end()) best = token;
    }
    return best == none ? Distribution{} : Distribution::certain(static_cast<int>(best));
  }

  // Reads nodes whose parents were read, in one pass.
  std::vector<float> read_nodes(std::span<const std::size_t> nodes, const DraftTokens& guesses) {
    std::vector<int> tokens;
    TokenTree tree = tree_;
    for (const std::size_t node : nodes) {
      const std::size_t parent = shape_.parent(node);
      const auto found = std::ranges::find(nodes_, parent);
      tree.add(parent == TokenTree::text ? TokenTree::text
                                         : static_cast<std::size_t>(found - nodes_.begin()));
      nodes_.push_back(node);
      tokens.push_back(guesses[guess_of_[node]].token);
    }
    growing_ = true;
    auto logits = reader_.model().read(
        reader_.cache(), {.tokens = tokens, .logits = LogitsOf::all, .attend = {.tree = &tree}});
    detail::check_logits(logits, tokens.size(), vocabulary());
    tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
    tree_ = std::move(tree);
    growing_ = false;
    return logits;
  }

  // Keeps, of the tree that the cache still holds, the path that became part of the text.
  void settle(std::span<const int> text) {
    const std::size_t root = reader_.tokens().size();
    Cache& cache = reader_.cache();
    std::vector<std::size_t> path;
    std::vector<int> kept;
    if (!growing_ && reader_.agreeing(text) == root) {
      std::size_t parent = TokenTree::text;
      for (std::size_t node = 0; node < tree_.size() && root + path.size() + 1 < text.size(); ++node) {
        if (tree_.parent(node) != parent || tokens_[node] != text[root + path.size()]) continue;
        path.push_back(node);
        kept.push_back(tokens_[node]);
        parent = node;
      }
    }
    if (!path.empty()) {
      cache.accept(path);
    } else if (growing_ || !tree_.empty()) {
      cache.truncate(root);
    }
    // The reader is updated last, because it takes back rows that it does not know.
    growing_ = false;
    tree_ = {};
    tokens_.clear();
    nodes_.clear();
    reader_.note(kept);
  }

  TextReader<Model, Cache> reader_;
  TokenTree shape_;
  std::vector<std::size_t> guess_of_;  // draft token of each node of the shape, or none
  // The part of the tree that the cache has read: all but the leaves.
  TokenTree tree_;
  std::vector<std::size_t> nodes_;  // for each node of tree_ its node in the shape
  std::vector<int> tokens_;
  bool growing_ = false;  // a call failed, perhaps between two layers
};

}  // namespace kvpolicy
