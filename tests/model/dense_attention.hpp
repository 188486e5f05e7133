// SPDX-License-Identifier: Apache-2.0
//
// The simplest cache, to test the model without the library: every row is kept unchanged, and attention is a
// loop in double over the rows that a query may see.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include <kvpolicy/core/tensor_view.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::reference {

class DenseCache {
 public:
  explicit DenseCache(const LlamaConfig& config)
      : windows_{config.windows}, keys_(config.layers), values_(config.layers) {}

  /// An AttendFn; `*this` must outlive it.
  [[nodiscard]] AttendFn attend() {
    return [this](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                  TensorView<const float> v, TensorView<float> out) { step(layer, q, k, v, out); };
  }

 private:
  void step(std::size_t layer, TensorView<const float> q, TensorView<const float> k,
            TensorView<const float> v, TensorView<float> out) {
    auto& keys = keys_[layer];  // [tokens, kv_heads, head_dim]
    auto& values = values_[layer];
    const std::size_t width = k.heads * k.head_dim;
    const std::size_t before = keys.size() / width;
    keys.insert(keys.end(), k.data, k.data + k.tokens * width);
    values.insert(values.end(), v.data, v.data + v.tokens * width);
    const std::size_t group = q.heads / k.heads;
    const double scale = 1.0 / std::sqrt(static_cast<double>(q.head_dim));
    for (std::size_t token = 0; token < q.tokens; ++token) {
      const std::size_t end = before + token + 1;
      const std::size_t window = windows_[layer] == 0 ? end : std::min(windows_[layer], end);
      for (std::size_t head = 0; head < q.heads; ++head) {
        const std::size_t offset = head / group * k.head_dim;
        std::vector<double> weights;
        for (std::size_t row = end - window; row < end; ++row) {
          double dot = 0;
          for (std::size_t i = 0; i < q.head_dim; ++i) {
            dot += static_cast<double>(q.row(token, head)[i]) *
                   static_cast<double>(keys[row * width + offset + i]);
          }
          weights.push_back(dot * scale);
        }
        const double highest = *std::ranges::max_element(weights);
        double sum = 0;
        for (double& weight : weights) sum += weight = std::exp(weight - highest);
        std::vector<double> mean(q.head_dim);
        for (std::size_t n = 0; n < window; ++n) {
          const float* value = values.data() + (end - window + n) * width + offset;
          for (std::size_t i = 0; i < mean.size(); ++i) {
            mean[i] += weights[n] / sum * static_cast<double>(value[i]);
          }
        }
        for (std::size_t i = 0; i < mean.size(); ++i) {
          out.row(token, head)[i] = static_cast<float>(mean[i]);
        }
      }
    }
  }

  std::vector<std::size_t> windows_;
  std::vector<std::vector<float>> keys_, values_;
};

}  // namespace kvpolicy::reference
