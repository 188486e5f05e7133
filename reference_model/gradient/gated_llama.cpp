// SPDX-License-Identifier: Apache-2.0
#include <reference_model/gradient/gated_llama.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <reference_model/gradient/operations.hpp>
#include <reference_model/linear.hpp>
#include <reference_model/parallel.hpp>

namespace kvpolicy::reference {

namespace {

/// Replaces the gradient of normalised rows by that of the rows before their norm.
void normalise_heads_back(const float* x, std::size_t rows, const std::vector<float>& weight, float eps,
                          float* gradient) {
  std::vector<float> dx(rows * weight.size());
  normalise_back(x, rows, weight, eps, gradient, dx.data());
  std::ranges::copy(dx, gradient);
}

}  // namespace

AttentionMask limited(AttentionMask mask, const LlamaConfig& config, std::size_t layer) {
  const std::size_t window = config.windows[layer];
  // A window hides sinks that are older than it, which a mask with sinks cannot express. The rule
  // is that of HeadPlan::limit_window: a mask that shows no more rows in all stays, any other
  // becomes the window.
  if (window == 0) return mask;
  const bool narrower = mask.recent <= window && mask.sinks <= window - mask.recent;
  return narrower ? mask : AttentionMask{.sinks = 0, .recent = window};
}

AttendFn attend_masked(const LlamaConfig& config, const HeadTable<AttentionMask>& masks) {
  require<ShapeError>(masks.layers() == config.layers && masks.heads() == config.kv_heads,
                      "attend_masked: masks for ", masks.layers(), " layers of ", masks.heads(),
                      " KV heads, the model has ", config.layers, " of ", config.kv_heads);
  return [&config, &masks](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                           TensorView<const float> v, TensorView<float> out) {
    std::vector<AttentionMask> own(masks.layer(layer).begin(), masks.layer(layer).end());
    for (AttentionMask& mask : own) mask = limited(mask, config, layer);
    masked_attention(q, k, v, own, out);
  };
}

GatedLlama::GatedLlama(const Llama& model, AttentionMask streaming, Mixing mixing, std::size_t stored_bytes)
    : model_{&model},
      streaming_{streaming},
      mixing_{mixing},
      stored_bytes_{stored_bytes},
      frequencies_{inverse_frequencies(model.config().rotary, model.config().head_dim)} {
  require(streaming.sinks > 0 || streaming.recent > 0,
          "GatedLlama: a mask without sinks and without recent rows shows a query nothing");
}

template <class T>
TensorView<T> GatedLlama::as_queries(T* data) const {
  return {data, tokens_.size(), model_->config().q_heads, model_->config().head_dim};
}

template <class T>
TensorView<T> GatedLlama::as_keys(T* data) const {
  return {data, tokens_.size(), model_->config().kv_heads, model_->config().head_dim};
}

std::vector<AttentionMask> GatedLlama::masks(std::size_t layer, AttentionMask mask) const {
  return std::vector<AttentionMask>(model_->config().kv_heads, limited(mask, model_->config(), layer));
}

Rotation GatedLlama::rotation() const {
  std::vector<std::size_t> positions(tokens_.size());
  std::iota(positions.begin(), positions.end(), std::size_t{0});
  return {positions, frequencies_};
}

const std::vector<float>& GatedLlama::read(std::span<const int> tokens) {
  std::vector<std::vector<float>> unmodified(model_->config().layers);
  const auto attend = [&](std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                          TensorView<const float> v, TensorView<float> out) {
    masked_attention(q, k, v, masks(layer, {}), out);
    unmodified[layer].assign(out.data, out.data + out.tokens * out.heads * out.head_dim);
  };
  std::vector<float> hidden = model_->hidden(tokens, attend);
  tokens_.assign(tokens.begin(), tokens.end());
  unmodified_ = std::move(unmodified);
  unmodified_hidden_ = std::move(hidden);
  hidden_.clear();
  return unmodified_hidden_;
}

std::size_t GatedLlama::stored_layers() const {
  const LlamaConfig& c = model_->config();
  const std::size_t query_width = c.q_heads * c.head_dim;
  const std::size_t key_width = c.kv_heads * c.head_dim;
  const std::size_t attentions = mixing_ == Mixing::full_of_mixed ? 2 : 1;
  const std::size_t plain = c.qk_norm ? query_width + key_width : 0;
  const std::size_t row = query_width + 2 * key_width + plain + attentions * (query_width + c.q_heads) +
                          c.hidden + 2 * c.intermediate;
  return std::min(c.layers, stored_bytes_ / (tokens_.size() * row * sizeof(float)));
}

void GatedLlama::forward_layer(std::size_t layer, const Rotation& rotation, std::vector<float>& x,
                               LayerRun& run) const {
  const LlamaConfig& c = model_->config();
  const LlamaLayer& weights = model_->weights().layers[layer];
  const std::size_t rows = tokens_.size();
  const std::size_t query_width = c.q_heads * c.head_dim;
  const std::size_t key_width = c.kv_heads * c.head_dim;
  const std::size_t head_width = query_width / c.kv_heads;  // channels of all query heads of one KV
                                                            // head
  run.q.resize(rows * query_width);
  run.k.resize(rows * key_width);
  run.v.resize(rows * key_width);
  if (c.qk_norm) {
    run.plain_q.resize(run.q.size());
    run.plain_k.resize(run.k.size());
  }
  std::vector<float> normed(rows * c.hidden);
  for_each_row_block(rows, [&](std::size_t first, std::size_t count) {
    float* part = normed.data() + first * c.hidden;
    normalise(x.data() + first * c.hidden, count, weights.attention_norm, c.norm_eps, part);
    apply_all({{&weights.q, run.q.data() + first * query_width},
               {&weights.k, run.k.data() + first * key_width},
               {&weights.v, run.v.data() + first * key_width}},
              part, count);
    if (c.qk_norm) {
      std::copy_n(run.q.data() + first * query_width, count * query_width,
                  run.plain_q.data() + first * query_width);
      std::copy_n(run.k.data() + first * key_width, count * key_width,
                  run.plain_k.data() + first * key_width);
    }
    normalise_heads(c, weights, count, run.q.data() + first * query_width, run.k.data() + first * key_width);
    rotation.apply(run.q.data(), c.q_heads, first, count);
    rotation.apply(run.k.data(), c.kv_heads, first, count);
  });

  const TensorView<const float> q = as_queries<const float>(run.q.data());
  const TensorView<const float> k = as_keys<const float>(run.k.data());
  const TensorView<const float> v = as_keys<const float>(run.v.data());
  run.streaming.resize(run.q.size());
  masked_attention(q, k, v, masks(layer, streaming_), as_queries(run.streaming.data()),
                   &run.streaming_record);
  if (mixing_ == Mixing::full_of_mixed) {
    run.full.resize(run.q.size());
    masked_attention(q, k, v, masks(layer, {}), as_queries(run.full.data()), &run.full_record);
  }
  const std::vector<float>& full = full_of(layer, run);

  std::vector<float> mixed(run.q.size());
  run.gate.resize(rows * c.intermediate);
  run.up.resize(run.gate.size());
  std::vector<float> activated(run.gate.size());
  for_each_row_block(rows, [&](std::size_t first, std::size_t count) {
    for (std::size_t i = first * query_width; i < (first + count) * query_width; ++i) {
      const auto gate = static_cast<float>(gates_(layer, i % query_width / head_width));
      mixed[i] = gate * full[i] + (1.0F - gate) * run.streaming[i];
    }
    weights.o.add_to(mixed.data() + first * query_width, count, x.data() + first * c.hidden);
  });
  run.middle = x;
  for_each_row_block(rows, [&](std::size_t first, std::size_t count) {
    float* part = normed.data() + first * c.hidden;
    const std::size_t at = first * c.intermediate;
    normalise(x.data() + first * c.hidden, count, weights.mlp_norm, c.norm_eps, part);
    apply_all({{&weights.gate, run.gate.data() + at}, {&weights.up, run.up.data() + at}}, part, count);
    std::copy_n(run.gate.data() + at, count * c.intermediate, activated.data() + at);
    swiglu(activated.data() + at, run.up.data() + at, count * c.intermediate);
    weights.down.add_to(activated.data() + at, count, x.data() + first * c.hidden);
  });
}

const std::vector<float>& GatedLlama::mix(const HeadGates& gates) {
  const LlamaConfig& c = model_->config();
  require<ShapeError>(gates.layers() == c.layers && gates.heads() == c.kv_heads, "GatedLlama: gates for ",
                      gates.layers(), " layers of ", gates.heads(), " KV heads, the model has ", c.layers,
                      " of ", c.kv_heads);
  require(!tokens_.empty(), "GatedLlama: nothing was read, mix needs a text");
  gates_ = gates;
  const std::size_t rows = tokens_.size();
  const std::size_t stored = stored_layers();
  inputs_.resize(c.layers);
  layers_.resize(stored);
  std::vector<float> x(rows * c.hidden);
  for (std::size_t row = 0; row < rows; ++row) {
    const auto token = static_cast<std::size_t>(tokens_[row]);
    model_->weights().embedding.weight.copy_rows(token, 1, x.data() + row * c.hidden);
  }
  const Rotation angles = rotation();
  LayerRun forgotten;
  for (std::size_t layer = 0; layer < c.layers; ++layer) {
    inputs_[layer] = x;
    const bool is_stored = layer >= c.layers - stored;
    forward_layer(layer, angles, x, is_stored ? layers_[layer - (c.layers - stored)] : forgotten);
  }
  hidden_.resize(x.size());
  for_each_row_block(rows, [&](std::size_t first, std::size_t count) {
    const std::size_t at = first * c.hidden;
    normalise(x.data() + at, count, model_->weights().norm, c.norm_eps, hidden_.data() + at);
  });
  last_ = std::move(x);
  return hidden_;
}

void GatedLlama::back_mlp(std::size_t layer, const LayerRun& run, std::vector<float>& dx) const {
  const LlamaConfig& c = model_->config();
  const LlamaLayer& weights = model_->weights().layers[layer];
  for_each_row_block(tokens_.size(), [&](std::size_t first, std::size_t count) {
    const std::size_t at = first * c.intermediate;
    std::vector<float> dgate(count * c.intermediate);
    std::vector<float> dup(dgate.size());
    std::vector<float> dnormed(count * c.hidden);
    float* change = dx.data() + first * c.hidden;
    weights.down.back(change, count, dgate.data());
    swiglu_back(run.gate.data() + at, run.up.data() + at, dgate.size(), dgate.data(), dgate.data(),
                dup.data());
    weights.gate.back(dgate.data(), count, dnormed.data());
    weights.up.add_back(dup.data(), count, dnormed.data());
    normalise_back(run.middle.data() + first * c.hidden, count, weights.mlp_norm, c.norm_eps, dnormed.data(),
                   change);
  });
}

void GatedLlama::back_attention(std::size_t layer, const LayerRun& run, const Rotation& rotation,
                                std::vector<float>& dx, HeadGates& dgates) const {
  const LlamaConfig& c = model_->config();
  const LlamaLayer& weights = model_->weights().layers[layer];
  const std::vector<float>& full = full_of(layer, run);
  const std::size_t rows = tokens_.size();
  const std::size_t query_width = c.q_heads * c.head_dim;
  const std::size_t key_width = c.kv_heads * c.head_dim;
  const std::size_t head_width = query_width / c.kv_heads;

  std::vector<float> dmixed(rows * query_width);
  for_each_row_block(rows, [&](std::size_t first, std::size_t count) {
    weights.o.back(dx.data() + first * c.hidden, count, dmixed.data() + first * query_width);
  });
  for (std::size_t i = 0; i < dmixed.size(); ++i) {
    dgates(layer, i % query_width / head_width) +=
        static_cast<double>(dmixed[i]) *
        (static_cast<double>(full[i]) - static_cast<double>(run.streaming[i]));
  }
  if (layer == 0) return;  // below are only embeddings, which get no gradient

  std::vector<float> dq(run.q.size());
  std::vector<float> dk(run.k.size());
  std::vector<float> dv(run.v.size());
  const auto back = [&](const std::vector<float>& out, const AttentionRecord& record, AttentionMask mask,
                        bool of_full) {
    std::vector<float> dout(dmixed.size());
    for (std::size_t i = 0; i < dout.size(); ++i) {
      const auto gate = static_cast<float>(gates_(layer, i % query_width / head_width));
      dout[i] = (of_full ? gate : 1.0F - gate) * dmixed[i];
    }
    masked_attention_back(as_queries(run.q.data()), as_keys(run.k.data()), as_keys(run.v.data()),
                          masks(layer, mask), as_queries(out.data()), record,
                          as_queries<const float>(dout.data()), as_queries(dq.data()), as_keys(dk.data()),
                          as_keys(dv.data()));
  };
  back(run.streaming, run.streaming_record, streaming_, false);
  if (mixing_ == Mixing::full_of_mixed) back(run.full, run.full_record, {}, true);

  for_each_row_block(rows, [&](std::size_t first, std::size_t count) {
    rotation.undo(dq.data(), c.q_heads, first, count);
    rotation.undo(dk.data(), c.kv_heads, first, count);
    if (c.qk_norm) {
      normalise_heads_back(run.plain_q.data() + first * query_width, count * c.q_heads, weights.q_norm,
                           c.norm_eps, dq.data() + first * query_width);
      normalise_heads_back(run.plain_k.data() + first * key_width, count * c.kv_heads, weights.k_norm,
                           c.norm_eps, dk.data() + first * key_width);
    }
    std::vector<float> dnormed(count * c.hidden);
    weights.q.back(dq.data() + first * query_width, count, dnormed.data());
    weights.k.add_back(dk.data() + first * key_width, count, dnormed.data());
    weights.v.add_back(dv.data() + first * key_width, count, dnormed.data());
    normalise_back(inputs_[layer].data() + first * c.hidden, count, weights.attention_norm, c.norm_eps,
                   dnormed.data(), dx.data() + first * c.hidden);
  });
}

HeadGates GatedLlama::gradient(std::span<const float> dhidden) {
  const LlamaConfig& c = model_->config();
  require(!hidden_.empty(), "GatedLlama: no mixed run, gradient needs one");
  require<ShapeError>(dhidden.size() == hidden_.size(), "GatedLlama: ", dhidden.size(),
                      " gradients of hidden numbers, must be ", hidden_.size());
  std::vector<float> dx(last_.size());
  for_each_row_block(tokens_.size(), [&](std::size_t first, std::size_t count) {
    const std::size_t at = first * c.hidden;
    normalise_back(last_.data() + at, count, model_->weights().norm, c.norm_eps, dhidden.data() + at,
                   dx.data() + at);
  });
  const Rotation angles = rotation();
  HeadGates dgates{c.layers, c.kv_heads, 0.0};
  LayerRun again;
  for (std::size_t layer = c.layers; layer-- > 0;) {
    const bool is_stored = layer >= c.layers - layers_.size();
    if (!is_stored) {
      std::vector<float> x = inputs_[layer];
      forward_layer(layer, angles, x, again);
    }
    const LayerRun& run = is_stored ? layers_[layer - (c.layers - layers_.size())] : again;
    back_mlp(layer, run, dx);
    back_attention(layer, run, angles, dx, dgates);
  }
  return dgates;
}

}  // namespace kvpolicy::reference
