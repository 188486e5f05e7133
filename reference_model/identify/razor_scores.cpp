// SPDX-License-Identifier: Apache-2.0
#include <reference_model/identify/razor_scores.hpp>

#include <cmath>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <reference_model/gradient/attention.hpp>
#include <reference_model/gradient/gated_llama.hpp>

namespace kvpolicy::reference {
namespace {

double product(const float* a, const float* b, std::size_t count) {
  double sum = 0.0;
  for (std::size_t i = 0; i < count; ++i) {
    sum += static_cast<double>(a[i]) * static_cast<double>(b[i]);
  }
  return sum;
}

}  // namespace

RazorScores razor_scores(const Llama& model, std::span<const int> opening, std::span<const int> tokens,
                         std::size_t repetitions) {
  // Where two tokens alternate, the row after the earlier occurrence is also the query's neighbour,
  // to which most heads attend anyway.
  require<ShapeError>(tokens.size() >= 3, "razor_scores: ", tokens.size(), " tokens, must be at least 3");
  require<ShapeError>(repetitions >= 2, "razor_scores: ", repetitions, " repetitions, must be at least 2");
  const LlamaConfig& c = model.config();
  const std::size_t period = tokens.size();
  std::vector<int> text{opening.begin(), opening.end()};
  for (std::size_t i = 0; i < repetitions; ++i) text.insert(text.end(), tokens.begin(), tokens.end());

  RazorScores scores{.echo = {c.layers, c.q_heads}, .induction = {c.layers, c.q_heads}};
  const double share = 1.0 / static_cast<double>(period * (repetitions - 1));
  const auto attend = [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                          TensorView<const float> v, TensorView<float> out) {
    const AttentionMask mask = limited({}, c, layer);
    AttentionRecord record;
    masked_attention(q, k, v, std::vector<AttentionMask>(c.kv_heads, mask), out, &record);
    const double scale = 1.0 / std::sqrt(static_cast<double>(q.head_dim));
    for (std::size_t head = 0; head < q.heads; ++head) {
      const std::size_t kv_head = head / (q.heads / k.heads);
      const auto attention = [&](std::size_t query, std::size_t row) {
        if (query - row >= mask.recent) return 0.0;  // outside the layer's window
        const double score = scale * product(q.row(query, head), k.row(row, kv_head), q.head_dim);
        return std::exp(score - static_cast<double>(record.log_sums[head * q.tokens + query]));
      };
      for (std::size_t query = opening.size() + period; query < text.size(); ++query) {
        for (std::size_t back = period; back <= query - opening.size(); back += period) {
          scores.echo(layer, head) += share * attention(query, query - back);
          scores.induction(layer, head) += share * attention(query, query - back + 1);
        }
      }
    }
  };
  static_cast<void>(model.hidden(text, attend));
  return scores;
}

}  // namespace kvpolicy::reference
