// SPDX-License-Identifier: Apache-2.0
//
// Random tensors in the layouts of callers: contiguous, padded, heads first. Guard zones are between and
// around the rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/tensor_view.hpp>

namespace test {

using Random = std::mt19937_64;

inline std::size_t below(Random& random, std::size_t count) {
  return static_cast<std::size_t>(random() % count);
}
template <class T>
const T& one_of(Random& random, const std::vector<T>& choices) {
  return choices[below(random, choices.size())];
}
/// Normally distributed, by the sum of 12 numbers of 16 bits; computed here, because the standard's distributions differ
/// between libraries.
inline float normal(Random& random) {
  std::int64_t sum = 0;
  for (int i = 0; i < 3; ++i) {
    const std::uint64_t bits = random();
    for (int part = 0; part < 4; ++part) sum += static_cast<std::int64_t>(bits >> 16 * part & 0xFFFF);
  }
  return static_cast<float>(static_cast<double>(sum) * 0x1p-16 - 6);
}

/// `padded` rows begin at any number, `aligned` ones at multiples of 8 numbers, with gaps between them.
enum class Layout { contiguous, padded, heads_first, aligned };

/// Owns a tensor [tokens, heads, head_dim] of T.
template <class T>
class Tensor {
 public:
  Tensor(std::size_t tokens, std::size_t heads, std::size_t head_dim, Layout layout = Layout::contiguous)
      : tokens_{tokens}, heads_{heads}, head_dim_{head_dim} {
    switch (layout) {
      case Layout::contiguous: head_stride_ = head_dim, token_stride_ = heads * head_dim; break;
      case Layout::padded: head_stride_ = head_dim + 3, token_stride_ = heads * head_stride_ + 5; break;
      case Layout::aligned: head_stride_ = head_dim + 8, token_stride_ = heads * head_stride_ + 16; break;
      case Layout::heads_first: token_stride_ = head_dim, head_stride_ = (tokens + 1) * head_dim; break;
    }
    const std::size_t span =
        tokens * heads == 0 ? 0 : (tokens - 1) * token_stride_ + (heads - 1) * head_stride_ + head_dim;
    numbers_.assign(span + 2 * zone, T{guard});
  }

  /// Fills it with fill(token, head, channel).
  template <class Fill>
  Tensor& fill(Fill fill) {
    for (std::size_t t = 0; t < tokens_; ++t) {
      for (std::size_t h = 0; h < heads_; ++h) {
        for (std::size_t i = 0; i < head_dim_; ++i) at(t, h, i) = T{fill(t, h, i)};
      }
    }
    return *this;
  }
  Tensor& randomize(Random& random, float deviation = 1.0F) {
    return fill([&](auto...) { return deviation * normal(random); });
  }

  [[nodiscard]] T& at(std::size_t token, std::size_t head, std::size_t channel) {
    return numbers_[zone + token * token_stride_ + head * head_stride_ + channel];
  }
  [[nodiscard]] float number(std::size_t token, std::size_t head, std::size_t channel) const {
    return static_cast<float>(numbers_[zone + token * token_stride_ + head * head_stride_ + channel]);
  }
  [[nodiscard]] std::vector<float> row(std::size_t token, std::size_t head) const {
    std::vector<float> row(head_dim_);
    for (std::size_t i = 0; i < head_dim_; ++i) row[i] = number(token, head, i);
    return row;
  }
  [[nodiscard]] std::vector<double> row_of_doubles(std::size_t token, std::size_t head) const {
    const auto row = this->row(token, head);
    return {row.begin(), row.end()};
  }

  [[nodiscard]] kvpolicy::TensorView<T> view() {
    return {numbers_.data() + zone, tokens_, heads_, head_dim_, token_stride_, head_stride_};
  }
  [[nodiscard]] kvpolicy::TensorView<const T> view() const {
    return {numbers_.data() + zone, tokens_, heads_, head_dim_, token_stride_, head_stride_};
  }
  [[nodiscard]] std::size_t tokens() const { return tokens_; }

  /// Whether nothing was written outside the rows.
  [[nodiscard]] bool guards_intact() const {
    std::vector<bool> inside(numbers_.size(), false);
    for (std::size_t t = 0; t < tokens_; ++t) {
      for (std::size_t h = 0; h < heads_; ++h) {
        for (std::size_t i = 0; i < head_dim_; ++i) {
          inside[zone + t * token_stride_ + h * head_stride_ + i] = true;
        }
      }
    }
    for (std::size_t i = 0; i < numbers_.size(); ++i) {
      if (!inside[i] && !(numbers_[i] == T{guard})) return false;
    }
    return true;
  }
  [[nodiscard]] const std::vector<T>& numbers() const { return numbers_; }

 private:
  static constexpr std::size_t zone = 32;
  static constexpr float guard = -7.5e8F;  // in half it is infinity, which serves as well

  std::size_t tokens_, heads_, head_dim_;
  std::size_t token_stride_ = 0;
  std::size_t head_stride_ = 0;
  std::vector<T> numbers_;
};

}  // namespace test
