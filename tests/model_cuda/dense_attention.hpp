// SPDX-License-Identifier: Apache-2.0
//
// The simplest cache for a model on a device: rows are copied to the host, kept in bfloat16, and attention is
// a loop in double over the rows that a query may see.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <reference_model/cuda/llama.hpp>

namespace kvpolicy::reference {

class DeviceDenseCache {
 public:
  explicit DeviceDenseCache(const LlamaConfig& config)
      : windows_{config.windows}, keys_(config.layers), values_(config.layers) {}

  /// A DeviceAttendFn; `*this` must outlive it.
  [[nodiscard]] DeviceAttendFn attend() {
    return [this](std::size_t layer, TensorView<const bfloat16> q, TensorView<const bfloat16> k,
                  TensorView<const bfloat16> v, TensorView<bfloat16> out,
                  cudaStream_t stream) { step(layer, q, k, v, out, stream); };
  }

 private:
  using Rows = std::vector<double>;  // [tokens, heads, head_dim], contiguous

  static Rows fetched(const TensorView<const bfloat16>& view) {
    const std::size_t width = view.heads * view.head_dim;
    std::vector<bfloat16> row(width);
    Rows rows;
    for (std::size_t token = 0; token < view.tokens; ++token) {
      gpu::check(cudaMemcpy(row.data(), view.row(token, 0), width * sizeof(bfloat16), cudaMemcpyDeviceToHost),
                 "cudaMemcpy");
      for (const bfloat16 x : row) rows.push_back(static_cast<double>(static_cast<float>(x)));
    }
    return rows;
  }

  void step(std::size_t layer, const TensorView<const bfloat16>& q, const TensorView<const bfloat16>& k,
            const TensorView<const bfloat16>& v, const TensorView<bfloat16>& out, cudaStream_t stream) {
    gpu::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    const std::size_t dim = q.head_dim;
    const std::size_t width = k.heads * dim;
    const std::size_t before = keys_[layer].size() / width;
    for (const double x : fetched(k)) keys_[layer].push_back(x);
    for (const double x : fetched(v)) values_[layer].push_back(x);
    const Rows queries = fetched(q);
    std::vector<bfloat16> result(queries.size());
    for (std::size_t token = 0; token < q.tokens; ++token) {
      const std::size_t end = before + token + 1;
      const std::size_t window = windows_[layer] == 0 ? end : std::min(windows_[layer], end);
      for (std::size_t head = 0; head < q.heads; ++head) {
        const std::size_t offset = head / (q.heads / k.heads) * dim;
        const double* query = queries.data() + (token * q.heads + head) * dim;
        std::vector<double> weights;
        for (std::size_t row = end - window; row < end; ++row) {
          const double* key = keys_[layer].data() + row * width + offset;
          double dot = 0;
          for (std::size_t i = 0; i < dim; ++i) dot += query[i] * key[i];
          weights.push_back(dot / std::sqrt(static_cast<double>(dim)));
        }
        const double highest = *std::ranges::max_element(weights);
        double sum = 0;
        for (double& weight : weights) sum += weight = std::exp(weight - highest);
        for (std::size_t i = 0; i < dim; ++i) {
          double mean = 0;
          for (std::size_t n = 0; n < window; ++n) {
            mean += weights[n] / sum * values_[layer][(end - window + n) * width + offset + i];
          }
          result[(token * q.heads + head) * dim + i] = bfloat16{static_cast<float>(mean)};
        }
      }
    }
    gpu::check(cudaMemcpy(out.data, result.data(), result.size() * sizeof(bfloat16), cudaMemcpyHostToDevice),
               "cudaMemcpy");
  }

  std::vector<std::size_t> windows_;
  std::vector<Rows> keys_, values_;
};

}  // namespace kvpolicy::reference
