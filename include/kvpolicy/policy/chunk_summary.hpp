// SPDX-License-Identifier: Apache-2.0
//
// One or two vectors that stand for the keys of a chunk, so that a query can tell which chunks
// are worth reading: the mean key (TriForce, arXiv:2404.11912), or the smallest and largest value
// of each channel, which bound every logit of the chunk from above (Quest, arXiv:2406.10774).
//
// Both scores are linear in their vectors: max(q a, q b) for a <= b is q+ b + q- a with q split by
// sign, so a chunk costs two dot products and no per-channel maximum, and the scores of a group of
// query heads sum to the score of one summed query (arXiv:2406.10774 scores each head apart).
#pragma once

#include <algorithm>
#include <array>
#include <concepts>
#include <cstddef>
#include <limits>
#include <span>
#include <string_view>
#include <type_traits>
#include <vector>

namespace kvpolicy {

/// What stands for the keys of a chunk.
/// `vectors` summaries a chunk, gathered row by row; `split` turns the queries of a group into the
/// vectors whose dot products with the summaries sum to the chunk's score.
template <class S>
concept ChunkSummary = std::copyable<S> && requires(S summary, const S& seen, std::size_t n,
                                                    std::span<const float> in, std::span<float> out) {
  { S::vectors } -> std::convertible_to<std::size_t>;
  S{n};                 // (head_dim)
  summary.add(in);      // one more key [head_dim], rounded as it is kept
  seen.finish(n, out);  // (which vector, [head_dim])
  summary.clear();
  S::split(n, in, out);  // (which vector, query [head_dim], added to [head_dim])
};

/// TriForce's summary: the mean of a chunk's keys.
class MeanKey {
 public:
  static constexpr std::string_view name = "mean";
  static constexpr std::size_t vectors = 1;

  explicit MeanKey(std::size_t head_dim) : sum_(head_dim, 0.0F) {}

  void add(std::span<const float> key) {
    for (std::size_t i = 0; i < sum_.size(); ++i) sum_[i] += key[i];
    ++rows_;
  }
  void finish(std::size_t, std::span<float> out) const {
    for (std::size_t i = 0; i < sum_.size(); ++i) out[i] = sum_[i] / static_cast<float>(rows_);
  }
  void clear() {
    std::ranges::fill(sum_, 0.0F);
    rows_ = 0;
  }
  static void split(std::size_t, std::span<const float> query, std::span<float> out) {
    for (std::size_t i = 0; i < query.size(); ++i) out[i] += query[i];
  }
  template <class Archive>
  void serialize(Archive& archive) {
    archive.numbers(std::span{sum_});
    archive(rows_);
  }

 private:
  std::vector<float> sum_;
  std::size_t rows_ = 0;
};

/// Quest's summary: the least and the greatest value of each channel of a chunk's keys.
class MinMaxKey {
 public:
  static constexpr std::string_view name = "minmax";
  static constexpr std::size_t vectors = 2;  // smallest, largest

  explicit MinMaxKey(std::size_t head_dim)
      : bounds_{std::vector<float>(head_dim), std::vector<float>(head_dim)} {
    clear();
  }

  void add(std::span<const float> key) {
    for (std::size_t i = 0; i < key.size(); ++i) {
      bounds_[0][i] = std::min(bounds_[0][i], key[i]);
      bounds_[1][i] = std::max(bounds_[1][i], key[i]);
    }
  }
  /// Numbers of keys that were added: what holds these holds them exactly, so that the bound stays one.
  void finish(std::size_t which, std::span<float> out) const {
    std::ranges::copy(bounds_[which], out.begin());
  }
  void clear() {
    std::ranges::fill(bounds_[0], std::numeric_limits<float>::infinity());
    std::ranges::fill(bounds_[1], -std::numeric_limits<float>::infinity());
  }
  static void split(std::size_t which, std::span<const float> query, std::span<float> out) {
    for (std::size_t i = 0; i < query.size(); ++i) {
      out[i] += which == 0 ? std::min(query[i], 0.0F) : std::max(query[i], 0.0F);
    }
  }
  template <class Archive>
  void serialize(Archive& archive) {
    for (std::vector<float>& bound : bounds_) archive.numbers(std::span{bound});
  }

 private:
  std::array<std::vector<float>, 2> bounds_;
};

static_assert(ChunkSummary<MeanKey> && ChunkSummary<MinMaxKey>);

/// A summary that treats each channel by itself, written once for the host and for kernels: `C` sees the
/// numbers of one channel of a chunk's keys, row by row, and then says its `vectors` numbers. `split` says with
/// what the query's number of that channel is multiplied. These members are marked KVPOLICY_HOST_DEVICE;
/// besides, `serialize(archive)` lists what a saved cache has to keep of a chunk that is not full.
template <class C>
concept SummaryChannel = std::is_trivially_copyable_v<C> && std::default_initializable<C> &&
                         requires(C channel, const C& seen, int n, float number) {
                           { C::name } -> std::convertible_to<std::string_view>;
                           { C::vectors } -> std::convertible_to<std::size_t>;
                           channel.add(number);
                           { seen.finish(n) } -> std::convertible_to<float>;       // (which vector)
                           { C::split(n, number) } -> std::convertible_to<float>;  // (which vector, query)
                         };

/// The ChunkSummary of a SummaryChannel. A device cache serves it once its engine was told to
/// (`gpu::Engine::serve`).
template <SummaryChannel C>
class ChannelSummary {
 public:
  using Channel = C;
  static constexpr std::string_view name = C::name;
  static constexpr std::size_t vectors = C::vectors;

  explicit ChannelSummary(std::size_t head_dim) : channels_(head_dim) {}

  void add(std::span<const float> key) {
    for (std::size_t i = 0; i < channels_.size(); ++i) channels_[i].add(key[i]);
  }
  void finish(std::size_t which, std::span<float> out) const {
    for (std::size_t i = 0; i < channels_.size(); ++i) out[i] = channels_[i].finish(static_cast<int>(which));
  }
  void clear() { std::ranges::fill(channels_, C{}); }
  static void split(std::size_t which, std::span<const float> query, std::span<float> out) {
    for (std::size_t i = 0; i < query.size(); ++i) out[i] += C::split(static_cast<int>(which), query[i]);
  }

  template <class Archive>
  void serialize(Archive& archive) {
    for (C& channel : channels_) archive(channel);
  }

 private:
  std::vector<C> channels_;
};

}  // namespace kvpolicy
