// SPDX-License-Identifier: Apache-2.0
#include <reference_model/llama.hpp>

#include <algorithm>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <reference_model/layer_steps.hpp>
#include <reference_model/operations.hpp>
#include <reference_model/parallel.hpp>

namespace kvpolicy::reference {
namespace {

void check_linear(const Linear& layer, const char* name, std::size_t inputs, std::size_t outputs, bool bias) {
  require<ShapeError>(layer.inputs() == inputs && layer.outputs() == outputs, "Llama: ", name, " is [",
                      layer.outputs(), ", ", layer.inputs(), "], config needs [", outputs, ", ", inputs, "]");
  require<ShapeError>(layer.bias.size() == (bias ? outputs : 0), "Llama: ", name, " has ", layer.bias.size(),
                      " biases, config needs ", bias ? outputs : 0);
}

void check_norm(const std::vector<float>& norm, const char* name, std::size_t width) {
  require<ShapeError>(norm.size() == width, "Llama: ", name, " has ", norm.size(), " weights, config needs ",
                      width);
}

/// The sum of of_matrix and of_vector over all weights.
template <class OfMatrix, class OfVector>
std::size_t sum_over(const LlamaWeights& weights, OfMatrix of_matrix, OfVector of_vector) noexcept {
  std::size_t sum = of_vector(weights.norm);
  for_each_linear(weights,
                  [&](const Linear& layer) { sum += of_matrix(layer.weight) + of_vector(layer.bias); });
  for (const LlamaLayer& layer : weights.layers) {
    for (const auto* norm : {&layer.attention_norm, &layer.q_norm, &layer.k_norm, &layer.mlp_norm}) {
      sum += of_vector(*norm);
    }
  }
  return sum;
}

}  // namespace

void normalise_heads(const LlamaConfig& config, const LlamaLayer& layer, std::size_t rows, float* q,
                     float* k) {
  if (!config.qk_norm) return;
  normalise(q, rows * layer.q.outputs() / config.head_dim, layer.q_norm, config.norm_eps, q);
  normalise(k, rows * layer.k.outputs() / config.head_dim, layer.k_norm, config.norm_eps, k);
}

// What `value_outputs` has made: of matrices that share the memory of the model's.
struct Llama::Projections {
  std::mutex mutex;
  std::vector<WeightMatrix> matrices;
  std::optional<ValueOutputs> views;
};

Llama::Llama(LlamaConfig config, LlamaWeights weights)
    : config_{std::move(config)},
      weights_{std::move(weights)},
      projections_{std::make_shared<Projections>()} {
  config_.validate();
  check_weights();
  frequencies_ = inverse_frequencies(config_.rotary, config_.head_dim);
}

void Llama::check_weights() const {
  const LlamaConfig& c = config_;
  const std::size_t q_width = c.q_heads * c.head_dim;
  const std::size_t kv_width = c.kv_heads * c.head_dim;
  check_linear(weights_.embedding, "embedding", c.hidden, c.vocabulary, false);
  if (!c.tied_embeddings) check_linear(weights_.head, "head", c.hidden, c.vocabulary, false);
  check_norm(weights_.norm, "norm", c.hidden);
  require<ShapeError>(weights_.layers.size() == c.layers, "Llama: has weights of ", weights_.layers.size(),
                      " layers, config needs ", c.layers);
  for (const LlamaLayer& layer : weights_.layers) {
    check_norm(layer.attention_norm, "attention_norm", c.hidden);
    check_linear(layer.q, "q", c.hidden, q_width, c.qkv_bias);
    check_linear(layer.k, "k", c.hidden, kv_width, c.qkv_bias);
    check_linear(layer.v, "v", c.hidden, kv_width, c.qkv_bias);
    check_norm(layer.q_norm, "q_norm", c.qk_norm ? c.head_dim : 0);
    check_norm(layer.k_norm, "k_norm", c.qk_norm ? c.head_dim : 0);
    check_linear(layer.o, "o", q_width, c.hidden, c.o_bias);
    check_norm(layer.mlp_norm, "mlp_norm", c.hidden);
    check_linear(layer.gate, "gate", c.hidden, c.intermediate, c.mlp_bias);
    check_linear(layer.up, "up", c.hidden, c.intermediate, c.mlp_bias);
    check_linear(layer.down, "down", c.intermediate, c.hidden, c.mlp_bias);
  }
}

const ValueOutputs* Llama::value_outputs() const {
  const std::lock_guard lock{projections_->mutex};
  if (projections_->views) return &*projections_->views;
  const auto is_int8 = [](const LlamaLayer& layer) { return layer.o.weight.format() == WeightFormat::int8; };
  if (std::ranges::any_of(weights_.layers, is_int8)) return nullptr;  // before the others are checked
  std::vector<WeightMatrix> matrices;
  ValueOutputs views{config_.shape()};
  for (const LlamaLayer& layer : weights_.layers) {
    const WeightMatrix& own = layer.o.weight;
    const auto set = [&]<class Number>(Number) {
      const Number* numbers = own.row<Number>(0);
      views.set(matrices.size(),
                TensorView<const Number>{numbers, config_.hidden, config_.q_heads, config_.head_dim});
    };
    switch (own.format()) {
      case WeightFormat::float32: set(float{}); break;
      case WeightFormat::float16: set(float16{}); break;
      case WeightFormat::bfloat16: set(bfloat16{}); break;
      case WeightFormat::int8: return nullptr;
    }
    matrices.push_back(own);
  }
  projections_->matrices = std::move(matrices);
  return &projections_->views.emplace(std::move(views));
}

std::size_t Llama::parameters() const noexcept {
  return sum_over(
      weights_, [](const WeightMatrix& matrix) { return matrix.size(); },
      [](const std::vector<float>& numbers) { return numbers.size(); });
}

std::size_t Llama::weight_bytes() const noexcept {
  return sum_over(
      weights_, [](const WeightMatrix& matrix) { return matrix.bytes(); },
      [](const std::vector<float>& numbers) { return numbers.size() * sizeof(float); });
}

std::vector<float> Llama::forward(std::span<const int> tokens, std::size_t first_position,
                                  const AttendFn& attend, LogitsOf logits) const {
  std::vector<std::size_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), first_position);
  return forward(tokens, positions, attend, logits);
}

std::vector<float> Llama::run(std::span<const int> tokens, std::span<const std::size_t> positions,
                              const AttendFn& attend) const {
  const LlamaConfig& c = config_;
  const std::size_t rows = tokens.size();
  require<ShapeError>(rows > 0, "Llama: no tokens, expected at least 1");
  require<ShapeError>(positions.size() == rows, "Llama: ", positions.size(), " positions for ", rows,
                      " tokens");
  // All tokens are checked before any work, so that a bad token leaves the caller's cache
  // unchanged.
  for (std::size_t row = 0; row < rows; ++row) {
    require<ShapeError>(tokens[row] >= 0 && static_cast<std::size_t>(tokens[row]) < c.vocabulary,
                        "Llama: token ", tokens[row], " at index ", row, " is outside the vocabulary of ",
                        c.vocabulary);
  }

  Activations a{rows, c.hidden, {c.q_heads * c.head_dim, c.kv_heads * c.head_dim, c.intermediate}};
  for (std::size_t row = 0; row < rows; ++row) {
    const auto token = static_cast<std::size_t>(tokens[row]);
    weights_.embedding.weight.copy_rows(token, 1, a.x.data() + row * c.hidden);
  }
  const Rotation rotation{positions, frequencies_};
  for (std::size_t i = 0; i < c.layers; ++i) {
    before_attention(c, weights_.layers[i], rotation, a);
    attend(i, TensorView<const float>{a.q.data(), rows, c.q_heads, c.head_dim},
           TensorView<const float>{a.k.data(), rows, c.kv_heads, c.head_dim},
           TensorView<const float>{a.v.data(), rows, c.kv_heads, c.head_dim},
           TensorView<float>{a.attended.data(), rows, c.q_heads, c.head_dim});
    after_attention(c, weights_.layers[i], a,
                    [&](const Linear& linear, const float* input, std::vector<float>& x) {
                      linear.add_to(input, rows, x.data());
                    });
  }

  return std::move(a.x);
}

std::vector<float> Llama::forward(std::span<const int> tokens, std::span<const std::size_t> positions,
                                  const AttendFn& attend, LogitsOf logits) const {
  const std::size_t wanted = logits == LogitsOf::all    ? tokens.size()
                             : logits == LogitsOf::last ? std::min<std::size_t>(tokens.size(), 1)
                                                        : 0;
  std::vector<std::size_t> rows(wanted);
  std::iota(rows.begin(), rows.end(), tokens.size() - wanted);
  return forward(tokens, positions, attend, rows);
}

std::vector<float> Llama::forward(std::span<const int> tokens, std::span<const std::size_t> positions,
                                  const AttendFn& attend, std::span<const std::size_t> rows) const {
  const LlamaConfig& c = config_;
  for (const std::size_t row : rows) {
    require<ShapeError>(row < tokens.size(), "Llama: logits of token ", row, " are asked for, there are ",
                        tokens.size());
  }
  std::vector<float> x = run(tokens, positions, attend);
  if (rows.empty()) return {};
  const std::size_t wanted = rows.size();
  if (wanted < tokens.size()) {
    std::vector<float> chosen(wanted * c.hidden);
    for (std::size_t i = 0; i < wanted; ++i) {
      std::copy_n(x.data() + rows[i] * c.hidden, c.hidden, chosen.data() + i * c.hidden);
    }
    x = std::move(chosen);
  }
  std::vector<float> normed(wanted * c.hidden);
  std::vector<float> result(wanted * c.vocabulary);
  for_each_row_block(wanted, [&](std::size_t first, std::size_t count) {
    normalise(x.data() + first * c.hidden, count, weights_.norm, c.norm_eps,
              normed.data() + first * c.hidden);
  });
  head().apply(normed.data(), wanted, result.data());
  return result;
}

std::vector<float> Llama::hidden(std::span<const int> tokens, const AttendFn& attend) const {
  std::vector<std::size_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), std::size_t{0});
  const std::vector<float> x = run(tokens, positions, attend);
  std::vector<float> normed(x.size());
  for_each_row_block(tokens.size(), [&](std::size_t first, std::size_t count) {
    const std::size_t at = first * config_.hidden;
    normalise(x.data() + at, count, weights_.norm, config_.norm_eps, normed.data() + at);
  });
  return normed;
}

}  // namespace kvpolicy::reference
