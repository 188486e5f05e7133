// SPDX-License-Identifier: Apache-2.0
#include <reference_model/identify/head_profile.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <reference_model/gradient/gated_llama.hpp>

namespace kvpolicy::reference {
namespace {

/// A query whose attention is measured, and the rows of the passkey that it should attend to.
struct Watched {
  std::size_t query = 0;
  std::size_t first = 0;  // of the rows that count for ProfileOf::passkey
  std::size_t rows = 0;
};

std::vector<Watched> watched_queries(const LabelledText& text) {
  std::vector<Watched> watched;
  for (const Passkey& key : text.passkeys) {
    for (std::size_t i = 0; i < key.tokens; ++i) {
      watched.push_back({.query = key.answer + i - 1, .first = key.hidden, .rows = key.tokens});
    }
  }
  if (!text.passkeys.empty()) return watched;
  for (const std::size_t label : text.labels) watched.push_back({.query = label});
  return watched;
}

/// The share of one query's attention on rows for which counts(row) is true.
template <class Counts>
double mass(TensorView<const float> q, TensorView<const float> k, std::size_t query, std::size_t head,
            std::size_t window, Counts counts) {
  const std::size_t kv_head = head / (q.heads / k.heads);
  const std::size_t begin = window == 0 ? 0 : query + 1 - std::min(window, query + 1);
  std::vector<double> scores;
  for (std::size_t row = begin; row <= query; ++row) {
    double product = 0.0;
    for (std::size_t i = 0; i < q.head_dim; ++i) {
      product += static_cast<double>(q.row(query, head)[i]) * static_cast<double>(k.row(row, kv_head)[i]);
    }
    scores.push_back(product / std::sqrt(static_cast<double>(q.head_dim)));
  }
  const double highest = *std::ranges::max_element(scores);
  double all = 0.0;
  double counted = 0.0;
  for (std::size_t i = 0; i < scores.size(); ++i) {
    const double weight = std::exp(scores[i] - highest);
    all += weight;
    if (counts(begin + i)) counted += weight;
  }
  return counted / all;
}

}  // namespace

HeadGates profile_heads(const Llama& model, std::span<const LabelledText> texts, AttentionMask streaming,
                        ProfileOf what, const RunReport& report) {
  const LlamaConfig& c = model.config();
  require<ShapeError>(!texts.empty(), "profile_heads: no texts, expected at least 1");
  HeadGates gates{c.layers, c.kv_heads, 0.0};
  const std::size_t group = c.q_heads / c.kv_heads;
  for (std::size_t n = 0; n < texts.size(); ++n) {
    const LabelledText& text = texts[n];
    text.check();
    require(what == ProfileOf::outside || !text.passkeys.empty(),
            "profile_heads: a text has no passkeys to look for");
    const std::vector<Watched> watched = watched_queries(text);
    const double share = 1.0 / static_cast<double>(watched.size() * group * texts.size());
    const auto attend = [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                            TensorView<const float> v, TensorView<float> out) {
      const std::vector<AttentionMask> masks(c.kv_heads, limited({}, c, layer));
      masked_attention(q, k, v, masks, out);
      for (const Watched& one : watched) {
        const auto counts = [&](std::size_t row) {
          if (what == ProfileOf::passkey) return row >= one.first && row - one.first < one.rows;
          return row >= streaming.sinks && one.query - row >= streaming.recent;
        };
        for (std::size_t head = 0; head < c.q_heads; ++head) {
          gates(layer, head / group) += share * mass(q, k, one.query, head, c.windows[layer], counts);
        }
      }
    };
    static_cast<void>(model.hidden(text.tokens, attend));
    if (report) report(n + 1, texts.size());
  }
  return gates;
}

}  // namespace kvpolicy::reference
