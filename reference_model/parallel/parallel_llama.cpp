// SPDX-License-Identifier: Apache-2.0
#include <reference_model/parallel/parallel_llama.hpp>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <numeric>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/state/archive.hpp>
#include <kvpolicy/version.hpp>
#include <reference_model/layer_steps.hpp>
#include <reference_model/operations.hpp>
#include <reference_model/parallel/shard_parts.hpp>

namespace kvpolicy::reference {
namespace {

// Some rows of a matrix, in blocks of `block`, with their biases.
Linear rows_of(const Linear& all, const std::vector<std::size_t>& blocks, std::size_t block) {
  const std::size_t columns = all.inputs();
  std::vector<float> numbers(blocks.size() * block * columns);
  std::vector<float> bias;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    all.weight.copy_rows(blocks[i] * block, block, numbers.data() + i * block * columns);
    if (all.bias.empty()) continue;
    const auto first = all.bias.begin() + static_cast<std::ptrdiff_t>(blocks[i] * block);
    bias.insert(bias.end(), first, first + static_cast<std::ptrdiff_t>(block));
  }
  return {columns, blocks.size() * block, std::move(numbers), std::move(bias)};
}

// Some columns of a matrix, in blocks. Its bias is one rank's, or it would be added once for each.
Linear columns_of(const Linear& all, const std::vector<std::size_t>& blocks, std::size_t block,
                  bool with_bias) {
  const std::size_t width = blocks.size() * block;
  std::vector<float> numbers(all.outputs() * width);
  std::vector<float> row(all.inputs());
  for (std::size_t r = 0; r < all.outputs(); ++r) {
    all.weight.copy_rows(r, 1, row.data());
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      std::copy_n(row.data() + blocks[i] * block, block, numbers.data() + r * width + i * block);
    }
  }
  return {width, all.outputs(), std::move(numbers), with_bias ? all.bias : std::vector<float>{}};
}

std::vector<std::size_t> counted(std::size_t first, std::size_t last) {
  std::vector<std::size_t> numbers(last - first);
  std::iota(numbers.begin(), numbers.end(), first);
  return numbers;
}

}  // namespace

void require_same_model(Communicator& ranks, const Llama& model) {
  require_same(ranks, "version of kvpolicy", digest(version_major, version_minor, version_patch),
               "start the same program on all");
  const LlamaConfig& c = model.config();
  std::vector<float> numbers{c.norm_eps};
  const auto add = [&](std::span<const float> some) {
    numbers.insert(numbers.end(), some.begin(), some.end());
  };
  add(inverse_frequencies(c.rotary, c.head_dim));
  add(model.weights().norm);
  for (const LlamaLayer& layer : model.weights().layers) {
    for (const auto* norm : {&layer.attention_norm, &layer.q_norm, &layer.k_norm, &layer.mlp_norm})
      add(*norm);
  }
  for_each_linear(model.weights(), [&](const Linear& linear) {
    add(linear.bias);
    if (linear.outputs() == 0) return;
    std::vector<float> row(linear.inputs());
    // Files differ in all rows or in none, so some are enough.
    for (const std::size_t r : {std::size_t{0}, linear.outputs() / 2, linear.outputs() - 1}) {
      linear.weight.copy_rows(r, 1, row.data());
      add(row);
    }
  });
  require_same(
      ranks, "model",
      digest(c.vocabulary, c.hidden, c.intermediate, c.layers, c.q_heads, c.kv_heads, c.head_dim, numbers));
}

void require_same_tokens(Communicator& ranks, std::span<const int> tokens,
                         std::span<const std::size_t> positions, std::span<const std::size_t> logits_of) {
  const auto list = [](auto numbers) { return std::vector(numbers.begin(), numbers.end()); };
  require_same(ranks, "tokens", digest(list(tokens), list(positions), list(logits_of)),
               "all must read the same text");
}

ParallelLlama::ParallelLlama(const Llama& model, const Shards& shards, Communicator& ranks)
    : ranks_{&ranks},
      config_{model.config()},
      embedding_{model.weights().embedding},
      head_{model.head()},
      norm_{model.weights().norm},
      frequencies_{inverse_frequencies(config_.rotary, config_.head_dim)} {
  check_same(model, shards);
  shape_ = shape_of_rank(config_.shape(), shards, ranks.rank());
  for (std::size_t layer = 0; layer < config_.layers; ++layer)
    has_cut_heads_ = has_cut_heads_ || !shards.merges(layer).empty();
  const std::size_t group = config_.q_heads / config_.kv_heads;
  const std::size_t rank = ranks.rank();
  for (std::size_t i = 0; i < config_.layers; ++i) {
    const LlamaLayer& whole = model.weights().layers[i];
    std::vector<std::size_t> kv_heads, q_heads;
    for (const HeadPart& part : parts_in_order(shards, i, rank)) {
      require(part.head < config_.kv_heads, "ParallelLlama: the shards have head ", part.head, " of layer ",
              i, ", the model has ", config_.kv_heads);
      kv_heads.push_back(part.head);
      for (std::size_t g = 0; g < group; ++g) q_heads.push_back(part.head * group + g);
    }
    const std::vector<std::size_t> neurons =
        counted(config_.intermediate * rank / ranks.size(), config_.intermediate * (rank + 1) / ranks.size());
    LlamaLayer own;
    own.attention_norm = whole.attention_norm;
    own.q = rows_of(whole.q, q_heads, config_.head_dim);
    own.k = rows_of(whole.k, kv_heads, config_.head_dim);
    own.v = rows_of(whole.v, kv_heads, config_.head_dim);
    own.o = columns_of(whole.o, q_heads, config_.head_dim, rank == 0);
    own.q_norm = whole.q_norm;
    own.k_norm = whole.k_norm;
    own.mlp_norm = whole.mlp_norm;
    own.gate = rows_of(whole.gate, neurons, 1);
    own.up = rows_of(whole.up, neurons, 1);
    own.down = columns_of(whole.down, neurons, 1, rank == 0);
    layers_.push_back(std::move(own));
  }
}

void ParallelLlama::check_same(const Llama& model, const Shards& shards) {
  require_same_model(*ranks_, model);
  require_same(*ranks_, "shards", digest_of(shards));
  require(shards.ranks() == ranks_->size(), "ParallelLlama: shards for ", shards.ranks(),
          " ranks, there are ", ranks_->size());
  require(shards.layers() == config_.layers, "ParallelLlama: shards of ", shards.layers(),
          " layers, the model has ", config_.layers);
}

std::size_t ParallelLlama::layer_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const LlamaLayer& layer : layers_) {
    for (const Linear* part : {&layer.q, &layer.k, &layer.v, &layer.o, &layer.gate, &layer.up, &layer.down}) {
      bytes += part->weight.bytes();
    }
  }
  return bytes;
}

const ValueOutputs* ParallelLlama::value_outputs() {
  if (value_outputs_) return &*value_outputs_;
  ValueOutputs views{shape_};
  for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
    const std::size_t heads = shape_.layer(layer).q_heads;
    if (heads == 0) continue;
    const float* weights = layers_[layer].o.weight.row<float>(0);
    views.set(layer, TensorView<const float>{weights, config_.hidden, heads, config_.head_dim});
  }
  return &value_outputs_.emplace(std::move(views));
}

std::vector<float> ParallelLlama::forward(std::span<const int> tokens, std::span<const std::size_t> positions,
                                          const AttendFn& attend, LogitsOf logits) const {
  const std::size_t wanted = logits == LogitsOf::all    ? tokens.size()
                             : logits == LogitsOf::last ? std::min<std::size_t>(tokens.size(), 1)
                                                        : 0;
  std::vector<std::size_t> rows(wanted);
  std::iota(rows.begin(), rows.end(), tokens.size() - wanted);
  return forward(tokens, positions, attend, rows);
}

// Adds a part that ranks have of a product's sum to the residual stream.
void ParallelLlama::add_over_ranks(const Linear& linear, const float* input, std::vector<float>& part,
                                   std::vector<float>& x) const {
  const std::size_t rows = x.size() / config_.hidden;
  std::ranges::fill(part, 0.0F);
  if (linear.inputs() > 0) {
    linear.add_to(input, rows, part.data());
  } else if (!linear.bias.empty()) {  // a rank may hold no head, and has the bias all the same
    for (std::size_t row = 0; row < rows; ++row)
      std::ranges::copy(linear.bias, part.begin() + static_cast<std::ptrdiff_t>(row * config_.hidden));
  }
  ranks_->sum(part);
  for (std::size_t i = 0; i < x.size(); ++i) x[i] += part[i];
}

std::vector<float> ParallelLlama::forward(std::span<const int> tokens, std::span<const std::size_t> positions,
                                          const AttendFn& attend, std::span<const std::size_t> wanted) const {
  const LlamaConfig& c = config_;
  const std::size_t rows = tokens.size();
  require_same_tokens(*ranks_, tokens, positions, wanted);
  require<ShapeError>(rows > 0, "ParallelLlama: no tokens, expected at least 1");
  require<ShapeError>(positions.size() == rows, "ParallelLlama: ", positions.size(), " positions for ", rows,
                      " tokens");
  for (const int token : tokens) {
    require<ShapeError>(token >= 0 && static_cast<std::size_t>(token) < c.vocabulary, "ParallelLlama: token ",
                        token, " is outside the vocabulary of ", c.vocabulary);
  }
  for (const std::size_t row : wanted) {
    require<ShapeError>(row < rows, "ParallelLlama: logits of token ", row, " are asked for, there are ",
                        rows);
  }
  std::size_t q_width = 0;
  std::size_t kv_width = 0;
  for (const LlamaLayer& layer : layers_) {
    q_width = std::max(q_width, layer.q.outputs());
    kv_width = std::max(kv_width, layer.k.outputs());
  }
  Activations a{rows, c.hidden, {q_width, kv_width, layers_.front().gate.outputs()}};
  for (std::size_t row = 0; row < rows; ++row) {
    embedding_.weight.copy_rows(static_cast<std::size_t>(tokens[row]), 1, a.x.data() + row * c.hidden);
  }
  const Rotation rotation{positions, frequencies_};
  std::vector<float> part(a.x.size());
  std::exception_ptr failed;  // this rank's part; the others get its sums meanwhile
  for (std::size_t i = 0; i < c.layers; ++i) {
    const LlamaLayer& layer = layers_[i];
    before_attention(c, layer, rotation, a);
    const std::size_t kv_heads = layer.k.outputs() / c.head_dim;
    const std::size_t q_heads = layer.q.outputs() / c.head_dim;
    try {
      attend(i, TensorView<const float>{a.q.data(), rows, q_heads, c.head_dim},
             TensorView<const float>{a.k.data(), rows, kv_heads, c.head_dim},
             TensorView<const float>{a.v.data(), rows, kv_heads, c.head_dim},
             TensorView<float>{a.attended.data(), rows, q_heads, c.head_dim});
    } catch (const CommunicationError&) {
      throw;
    } catch (...) {
      if (failed == nullptr) failed = std::current_exception();
    }
    after_attention(c, layer, a, [&](const Linear& linear, const float* input, std::vector<float>& x) {
      add_over_ranks(linear, input, part, x);
    });
  }
  fail_together(*ranks_, failed);
  if (wanted.empty()) return {};
  std::vector<float> chosen(wanted.size() * c.hidden);
  for (std::size_t i = 0; i < wanted.size(); ++i)
    std::copy_n(a.x.data() + wanted[i] * c.hidden, c.hidden, chosen.data() + i * c.hidden);
  std::vector<float> normed(chosen.size());
  normalise(chosen.data(), wanted.size(), norm_, c.norm_eps, normed.data());
  std::vector<float> result(wanted.size() * c.vocabulary);
  head_.apply(normed.data(), wanted.size(), result.data());
  return result;
}

}  // namespace kvpolicy::reference
