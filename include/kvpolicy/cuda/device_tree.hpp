// SPDX-License-Identifier: Apache-2.0
//
// A tree of guesses (core/token_tree.hpp) as the kernels of a call see it: depths and a bit mask, put
// into device memory once for all layers of a step.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <kvpolicy/core/token_tree.hpp>
#include <kvpolicy/cuda/kernels/tree.cuh>
#include <kvpolicy/cuda/memory.hpp>
#include <kvpolicy/cuda/writes.hpp>

namespace kvpolicy::gpu {

/// Not synchronised. Work put on the stream before reads what was there before.
class DeviceTree {
 public:
  explicit DeviceTree(MemoryResource* memory) : memory_{memory} {}

  [[nodiscard]] std::size_t bytes() const { return bytes_; }
  void give_back_on(const LastUse& use) noexcept { block_.give_back_on(use); }

  /// What the next call needs, obtained before anything changes.
  struct Next {
    bool is_new = false;  ///< else it is there already, and the rest is empty
    TokenTree tree;
    std::vector<std::uint64_t> words;
    DeviceBuffer block;  ///< null: there is room
    std::size_t bytes = 0;
  };
  /// For a call whose queries are the last `queries` nodes. @throws std::bad_alloc
  [[nodiscard]] Next prepare(const TokenTree& tree, std::size_t queries, cudaStream_t stream) const {
    Next next;
    if (queries_ == queries && tree_ == tree) return next;
    next.is_new = true;
    next.tree = tree;
    next.words = words_of(tree, queries);
    const std::size_t bytes = next.words.size() * sizeof(std::uint64_t);
    if (bytes > bytes_) {
      next.bytes = std::max(bytes, 2 * bytes_);
      next.block = allocate(memory_, next.bytes, stream);
    }
    return next;
  }
  /// Puts it on the stream. What the kernels see is valid until the next `write`. @throws DeviceError
  void write(Next& next, std::size_t queries, cudaStream_t stream) {
    if (!next.is_new) return;
    queries_ = 0;  // whatever is there when a launch fails, it is no tree
    if (next.block != nullptr) {
      give_back_on(stream);  // after the calls that read it
      std::swap(block_, next.block);
      bytes_ = next.bytes;
    }
    DeviceWrites writes{stream};
    auto* place = reinterpret_cast<std::uint64_t*>(block_.get());
    for (std::size_t i = 0; i < next.words.size(); ++i) writes.write(place + i, next.words[i]);
    writes.flush();
    std::swap(tree_, next.tree);
    queries_ = queries;
  }
  /// What `write` put there, for the kernels.
  [[nodiscard]] CallTree view() const {
    CallTree view = shape_of(tree_, queries_);
    const std::size_t depths = mask_words(tree_, queries_);
    view.seen = reinterpret_cast<const std::uint32_t*>(block_.get());
    view.depths = reinterpret_cast<const int*>(block_.get() + depths * sizeof(std::uint64_t));
    return view;
  }

  /// All but the addresses.
  [[nodiscard]] static CallTree shape_of(const TokenTree& tree, std::size_t queries) {
    CallTree shape;
    shape.nodes = static_cast<int>(tree.size());
    shape.words = CallTree::words_of(shape.nodes, static_cast<int>(queries));
    const std::size_t older = tree.size() - queries;
    shape.lowest = queries == 0 ? 0 : static_cast<int>(tree.depth(older));
    for (std::size_t node = older; node < tree.size(); ++node) {
      const auto depth = static_cast<int>(tree.depth(node));
      shape.lowest = std::min(shape.lowest, depth);
      shape.highest = std::max(shape.highest, depth);
    }
    return shape;
  }

 private:
  /// Words of 64 bits of the mask; the depths follow it, two to a word.
  [[nodiscard]] static std::size_t mask_words(const TokenTree& tree, std::size_t queries) {
    const int words = CallTree::words_of(static_cast<int>(tree.size()), static_cast<int>(queries));
    return queries * static_cast<std::size_t>(words) / 2;
  }

  [[nodiscard]] static std::vector<std::uint64_t> words_of(const TokenTree& tree, std::size_t queries) {
    const std::size_t mask = mask_words(tree, queries);
    std::vector<std::uint64_t> words(mask + (tree.size() + 1) / 2);
    const std::size_t older = tree.size() - queries;
    const std::size_t own_word = static_cast<std::size_t>(CallTree::word_of(static_cast<int>(older))) / 2;
    for (std::size_t query = 0; query < queries; ++query) {
      std::uint64_t* row = words.data() + query * (mask / queries);
      for (std::size_t node = older + query; node != TokenTree::text; node = tree.parent(node)) {
        const bool own = node >= older;
        const std::size_t bit = own ? node - older : node;
        row[(own ? own_word : 0) + bit / 64] |= std::uint64_t{1} << bit % 64;
      }
    }
    for (std::size_t node = 0; node < tree.size(); ++node) {
      words[mask + node / 2] |= std::uint64_t{tree.depth(node)} << node % 2 * 32;
    }
    return words;
  }

  MemoryResource* memory_;
  TokenTree tree_;
  std::size_t queries_ = 0;  // 0: there is none
  DeviceBuffer block_;
  std::size_t bytes_ = 0;
};

}  // namespace kvpolicy::gpu
