// SPDX-License-Identifier: Apache-2.0
#include <reference_model/cuda/llama.hpp>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/cuda/runtime.hpp>
#include <reference_model/cuda/kernels/embed.cuh>
#include <reference_model/cuda/kernels/likeliest.cuh>
#include <reference_model/cuda/kernels/norm.cuh>
#include <reference_model/cuda/kernels/rotate.cuh>
#include <reference_model/cuda/kernels/swiglu.cuh>

namespace kvpolicy::reference {
namespace {

namespace kernels = gpu::llama;
using gpu::allocate;
using gpu::check;
using gpu::Kernel;
using gpu::launch;

// The MLP works on blocks of rows. A block has enough rows for full-sized products, and its
// activations, which are seven times as wide as the residual stream, stay small beside those of a
// long chunk.
constexpr std::size_t most_mlp_rows = 4096;

gpu::DeviceBuffer upload(std::span<const float> numbers, gpu::MemoryResource* memory, cudaStream_t stream) {
  gpu::DeviceBuffer block = allocate(memory, numbers.size_bytes(), stream);
  check(cudaMemcpyAsync(block.get(), numbers.data(), numbers.size_bytes(), cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
  return block;
}

// The source is pageable memory, so the driver has copied the numbers when the call returns.
void upload(int* to, std::span<const int> numbers, cudaStream_t stream) {
  check(cudaMemcpyAsync(to, numbers.data(), numbers.size_bytes(), cudaMemcpyHostToDevice, stream),
        "cudaMemcpyAsync");
}

void check_config(const LlamaConfig& config) {
  config.validate();
  require(config.head_dim % 8 == 0, "CudaLlama: head_dim is ", config.head_dim,
          ", must be a multiple of 8: attention reads rows in steps of 16 bytes");
  require(!config.qk_norm,
          "CudaLlama: norms of queries and keys (Qwen3) are not supported on a GPU: "
          "run this model on the CPU");
  require(config.intermediate % 2 == 0, "CudaLlama: the MLP is ", config.intermediate,
          " wide, must be an even number");
}

}  // namespace

// ---- weights ---------------------------------------------------------------------------------

CudaLlama::CudaLlama(const LlamaConfig& config, const CudaLlamaOptions& options, cudaStream_t stream)
    : config_{(check_config(config), config)},
      options_{(static_cast<void>(gpu::Device::current()), options)},
      matmul_{options.memory, stream} {
  inverse_frequencies_ = upload(inverse_frequencies(config.rotary, config.head_dim), options.memory, stream);
  const std::size_t bytes = sizeof(Progress) + most_choices * sizeof(int);
  progress_ = allocate(options.memory, bytes, stream);
  check(cudaMemsetAsync(progress_.get(), 0, bytes, stream), "cudaMemsetAsync");
}

CudaLlama::CudaLlama(const Llama& model, const CudaLlamaOptions& options, cudaStream_t stream)
    : CudaLlama{model.config(), options, stream} {
  const LlamaWeights& weights = model.weights();
  const auto linear = [&](std::initializer_list<const Linear*> parts, Output output, WeightFormat format) {
    return DeviceLinear{parts, output, format, options.memory, stream};
  };
  constexpr auto exact = WeightFormat::bfloat16;
  embedding_ = linear({&weights.embedding}, Output::float32, exact);
  for (const LlamaLayer& layer : weights.layers) {
    layers_.push_back({.attention_norm = upload(layer.attention_norm, options.memory, stream),
                       .qkv = linear({&layer.q, &layer.k, &layer.v}, Output::bfloat16, options.weights),
                       .o = linear({&layer.o}, Output::added_float32, options.weights),
                       .mlp_norm = upload(layer.mlp_norm, options.memory, stream),
                       .gate_up = linear({&layer.gate, &layer.up}, Output::bfloat16, options.weights),
                       .down = linear({&layer.down}, Output::added_float32, options.weights)});
  }
  norm_ = upload(weights.norm, options.memory, stream);
  if (!config_.tied_embeddings) head_ = linear({&weights.head}, Output::float32, exact);
  count_weights();
}

CudaLlama CudaLlama::random(const LlamaConfig& config, const CudaLlamaOptions& options, std::uint64_t seed,
                            cudaStream_t stream) {
  CudaLlama model{config, options, stream};
  const std::size_t hidden = config.hidden;
  const std::vector<float> ones(hidden, 1.0F);
  const auto linear = [&](std::size_t inputs, std::size_t outputs, Output output, WeightFormat format) {
    return DeviceLinear::random(inputs, outputs, output, format, seed++, options.memory, stream);
  };
  constexpr auto exact = WeightFormat::bfloat16;
  model.embedding_ = linear(hidden, config.vocabulary, Output::float32, exact);
  for (std::size_t i = 0; i < config.layers; ++i) {
    model.layers_.push_back(
        {.attention_norm = upload(ones, options.memory, stream),
         .qkv = linear(hidden, model.qkv_width(), Output::bfloat16, options.weights),
         .o = linear(config.q_heads * config.head_dim, hidden, Output::added_float32, options.weights),
         .mlp_norm = upload(ones, options.memory, stream),
         .gate_up = linear(hidden, 2 * config.intermediate, Output::bfloat16, options.weights),
         .down = linear(config.intermediate, hidden, Output::added_float32, options.weights)});
  }
  model.norm_ = upload(ones, options.memory, stream);
  if (!config.tied_embeddings) model.head_ = linear(hidden, config.vocabulary, Output::float32, exact);
  model.count_weights();
  return model;
}

void CudaLlama::count_weights() {
  const std::size_t norm = config_.hidden * sizeof(float);
  weight_bytes_ = embedding_.bytes() + norm + (config_.tied_embeddings ? 0 : head_.bytes());
  for (const Layer& layer : layers_) {
    weight_bytes_ +=
        2 * norm + layer.qkv.bytes() + layer.o.bytes() + layer.gate_up.bytes() + layer.down.bytes();
  }
}

// ---- room ------------------------------------------------------------------------------------

std::size_t CudaLlama::activation_bytes() const { return room_.bytes + matmul_.bytes(); }

CudaLlama::Room CudaLlama::lay_out(std::size_t rows, std::size_t logit_rows, std::byte* start) const {
  Room room{.rows = rows, .mlp_rows = std::min(rows, most_mlp_rows), .logit_rows = logit_rows};
  const auto assign = [&]<class T>(T*& at, std::size_t count) {
    constexpr std::size_t alignment = 256;  // alignment that the algorithms of products are chosen
                                            // for
    at = start == nullptr ? nullptr : reinterpret_cast<T*>(start + room.bytes);
    room.bytes += (count * sizeof(T) + alignment - 1) / alignment * alignment;
  };
  const std::size_t pairs = config_.head_dim / 2;
  assign(room.tokens, rows);
  assign(room.offsets, rows);
  assign(room.cosines, rows * pairs);
  assign(room.sines, rows * pairs);
  assign(room.residual, rows * config_.hidden);
  assign(room.normed, rows * config_.hidden);
  assign(room.qkv, rows * qkv_width());
  assign(room.attended, rows * config_.q_heads * config_.head_dim);
  assign(room.gate_up, room.mlp_rows * 2 * config_.intermediate);
  assign(room.gated, room.mlp_rows * config_.intermediate);
  assign(room.logits, logit_rows * config_.vocabulary);
  return room;
}

void CudaLlama::reserve(std::size_t rows, std::size_t logit_rows, cudaStream_t stream) {
  require<ShapeError>(rows <= std::size_t{1} << 24, "CudaLlama: ", rows,
                      " tokens at once, a call takes at most 2^24");
  if (rows <= room_.rows && logit_rows <= room_.logit_rows) return;
  rows = std::max(rows, room_.rows);
  logit_rows = std::max(logit_rows, room_.logit_rows);
  for (const Layer& layer : layers_) {
    layer.qkv.reserve(matmul_, rows, stream);
    layer.o.reserve(matmul_, rows, stream);
    layer.gate_up.reserve(matmul_, std::min(rows, most_mlp_rows), stream);
    layer.down.reserve(matmul_, std::min(rows, most_mlp_rows), stream);
  }
  ++room_version_;
  room_ = {};  // is freed first, so that old and new buffers never exist at once
  gpu::DeviceBuffer memory = allocate(options_.memory, lay_out(rows, logit_rows, nullptr).bytes, stream);
  room_ = lay_out(rows, logit_rows, memory.get());
  room_.memory = std::move(memory);
  branched_ = false;
  count_offsets(stream);
}

void CudaLlama::set_tokens(std::span<const int> tokens, std::size_t first_position, cudaStream_t stream) {
  put_tokens(tokens, first_position, stream);
  if (!branched_) return;
  count_offsets(stream);
  branched_ = false;
}

void CudaLlama::set_tokens(std::span<const int> tokens, std::span<const std::size_t> positions,
                           cudaStream_t stream) {
  require<ShapeError>(positions.size() == tokens.size(), "CudaLlama: ", positions.size(), " positions for ",
                      tokens.size(), " tokens, must be as many");
  put_tokens(tokens, positions.empty() ? 0 : std::ranges::max(positions), stream);
  std::vector<int> offsets(positions.size());
  for (std::size_t row = 0; row < positions.size(); ++row) {
    offsets[row] = static_cast<int>(positions[row]) - static_cast<int>(positions.front());
  }
  branched_ = true;
  upload(room_.offsets, std::span<const int>{offsets}, stream);
  const auto position = static_cast<int>(positions.front());
  upload(&progress()->position, std::span{&position, 1}, stream);
}

void CudaLlama::put_tokens(std::span<const int> tokens, std::size_t position, cudaStream_t stream) {
  require<ShapeError>(!tokens.empty(), "CudaLlama: no tokens, expected at least 1");
  require<ShapeError>(tokens.size() <= room_.rows, "CudaLlama: ", tokens.size(),
                      " tokens at once, reserved are ", room_.rows);
  constexpr std::size_t last = std::numeric_limits<int>::max() - (std::size_t{1} << 24);
  require<ShapeError>(position <= last, "CudaLlama: position ", position, ", must be at most ", last);
  for (std::size_t row = 0; row < tokens.size(); ++row) {
    require<ShapeError>(tokens[row] >= 0 && static_cast<std::size_t>(tokens[row]) < config_.vocabulary,
                        "CudaLlama: token ", tokens[row], " at index ", row, " is outside the vocabulary of ",
                        config_.vocabulary);
  }
  upload(room_.tokens, tokens, stream);
  const auto first = static_cast<int>(position);
  upload(&progress()->position, std::span{&first, 1}, stream);
}

// The usual case: the positions of the rows are consecutive.
void CudaLlama::count_offsets(cudaStream_t stream) {
  std::vector<int> offsets(room_.rows);
  std::iota(offsets.begin(), offsets.end(), 0);
  upload(room_.offsets, std::span<const int>{offsets}, stream);
}

void CudaLlama::embed(std::size_t rows, cudaStream_t stream) {
  launch(
      Kernel{kernels::angles_kernel<>, "angles_kernel", kernels::angles_threads},
      {.x = static_cast<int>(rows)}, stream,
      kernels::AnglesParams{.position = &progress()->position,
                            .offsets = room_.offsets,
                            .inverse_frequencies = reinterpret_cast<const float*>(inverse_frequencies_.get()),
                            .cosines = room_.cosines,
                            .sines = room_.sines,
                            .pairs = static_cast<int>(config_.head_dim / 2)});
  launch(Kernel{kernels::embed_kernel<>, "embed_kernel", kernels::embed_threads},
         {.x = static_cast<int>(rows)}, stream,
         kernels::EmbedParams{.tokens = room_.tokens,
                              .embedding = reinterpret_cast<const std::uint16_t*>(embedding_.weight()),
                              .residual = room_.residual,
                              .position = &progress()->position,
                              .rows = static_cast<int>(rows),
                              .vocabulary = static_cast<int>(config_.vocabulary),
                              .hidden = static_cast<int>(config_.hidden)});
}

void CudaLlama::norm(const gpu::DeviceBuffer& weight, const float* x, std::size_t rows, cudaStream_t stream) {
  launch(Kernel{kernels::norm_kernel<>, "norm_kernel", kernels::norm_threads, kernels::norm_shared_bytes()},
         {.x = static_cast<int>(rows)}, stream,
         kernels::NormParams{.x = x,
                             .weight = reinterpret_cast<const float*>(weight.get()),
                             .out = room_.normed,
                             .width = static_cast<int>(config_.hidden),
                             .eps = config_.norm_eps});
}

void CudaLlama::before_attention(const Layer& layer, std::size_t rows, cudaStream_t stream) {
  norm(layer.attention_norm, room_.residual, rows, stream);
  layer.qkv.apply(matmul_, reinterpret_cast<const bfloat16*>(room_.normed), rows, room_.qkv, stream);
  launch(Kernel{kernels::rotate_kernel<>, "rotate_kernel", kernels::rotate_threads},
         {.x = static_cast<int>(rows)}, stream,
         kernels::RotateParams{.rows = room_.qkv,
                               .cosines = room_.cosines,
                               .sines = room_.sines,
                               .row_width = static_cast<int>(qkv_width()),
                               .heads = static_cast<int>(config_.q_heads + config_.kv_heads),
                               .pairs = static_cast<int>(config_.head_dim / 2)});
}

void CudaLlama::after_attention(const Layer& layer, std::size_t rows, cudaStream_t stream) {
  const auto* attended = reinterpret_cast<const bfloat16*>(room_.attended);
  layer.o.apply(matmul_, attended, rows, room_.residual, stream);
  const auto words = static_cast<int>(config_.intermediate / 2);
  for (std::size_t first = 0; first < rows; first += room_.mlp_rows) {
    const std::size_t count = std::min(room_.mlp_rows, rows - first);
    float* residual = room_.residual + first * config_.hidden;
    norm(layer.mlp_norm, residual, count, stream);
    layer.gate_up.apply(matmul_, reinterpret_cast<const bfloat16*>(room_.normed), count, room_.gate_up,
                        stream);
    launch(Kernel{kernels::swiglu_kernel<>, "swiglu_kernel", kernels::swiglu_threads},
           {.x = static_cast<int>(count),
            .y = (words + kernels::swiglu_words_of_block - 1) / kernels::swiglu_words_of_block},
           stream,
           kernels::SwigluParams{.gate_up = reinterpret_cast<const std::uint32_t*>(room_.gate_up),
                                 .out = reinterpret_cast<std::uint32_t*>(room_.gated),
                                 .words = words});
    layer.down.apply(matmul_, reinterpret_cast<const bfloat16*>(room_.gated), count, residual, stream);
  }
}

void CudaLlama::forward(std::size_t rows, const DeviceAttendFn& attend, LogitsOf logits,
                        cudaStream_t stream) {
  const std::size_t wanted = logits == LogitsOf::all ? rows : logits == LogitsOf::last ? 1 : 0;
  require<ShapeError>(rows > 0 && rows <= room_.rows, "CudaLlama: ", rows,
                      " tokens at once, must be 1 to the ", room_.rows, " reserved");
  require<ShapeError>(wanted <= room_.logit_rows, "CudaLlama: logits of ", wanted, " tokens, reserved are ",
                      room_.logit_rows);
  embed(rows, stream);
  const LlamaConfig& c = config_;
  auto* qkv = reinterpret_cast<bfloat16*>(room_.qkv);
  const auto part = [&](std::size_t first_head, std::size_t heads) {
    return TensorView<const bfloat16>{
        qkv + first_head * c.head_dim, rows, heads, c.head_dim, qkv_width(), c.head_dim};
  };
  const TensorView<bfloat16> attended{reinterpret_cast<bfloat16*>(room_.attended), rows, c.q_heads,
                                      c.head_dim};
  for (std::size_t i = 0; i < c.layers; ++i) {
    before_attention(layers_[i], rows, stream);
    attend(i, part(0, c.q_heads), part(c.q_heads, c.kv_heads), part(c.q_heads + c.kv_heads, c.kv_heads),
           attended, stream);
    after_attention(layers_[i], rows, stream);
  }
  logit_rows_ = wanted;
  if (wanted == 0) return;
  norm(norm_, room_.residual + (rows - wanted) * c.hidden, wanted, stream);
  head().apply(matmul_, reinterpret_cast<const bfloat16*>(room_.normed), wanted, room_.logits, stream);
}

void CudaLlama::choose_likeliest(cudaStream_t stream) {
  require<ShapeError>(logit_rows_ > 0, "CudaLlama: the latest forward gave no logits");
  launch(Kernel{kernels::likeliest_kernel<>, "likeliest_kernel", kernels::likeliest_threads,
                kernels::likeliest_shared_bytes()},
         {}, stream,
         kernels::LikeliestParams{.logits = logits_of(logit_rows_ - 1),
                                  .vocabulary = static_cast<int>(config_.vocabulary),
                                  .choices = choices()});
}

void CudaLlama::choose(DeviceSampler& sampler, cudaStream_t stream) {
  require<ShapeError>(logit_rows_ > 0, "CudaLlama: the latest forward gave no logits");
  require<ShapeError>(sampler.vocabulary() == config_.vocabulary, "CudaLlama: the sampler chooses among ",
                      sampler.vocabulary(), " tokens, the model has ", config_.vocabulary);
  sampler.choose(logits_of(logit_rows_ - 1), choices(), stream);
}

// ---- results for the host --------------------------------------------------------------------

std::vector<int> CudaLlama::take_choices(cudaStream_t stream) {
  const auto fetch = [&](int* to, const int* from, std::size_t count) {
    check(cudaMemcpyAsync(to, from, count * sizeof(int), cudaMemcpyDeviceToHost, stream), "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  };
  int made = 0;
  fetch(&made, &progress()->choices, 1);
  const auto count = static_cast<std::size_t>(made);
  std::vector<int> tokens(std::min(count, most_choices));
  if (!tokens.empty()) fetch(tokens.data(), chosen(), tokens.size());
  check(cudaMemsetAsync(&progress()->choices, 0, sizeof(int), stream), "cudaMemsetAsync");
  require<CapacityError>(count <= most_choices, "CudaLlama: ", count, " choices were made, only the first ",
                         most_choices, " are known");
  const auto bad = std::ranges::find(tokens, kernels::no_token);
  require<ShapeError>(bad == tokens.end(), "CudaLlama: no token at choice ", bad - tokens.begin(),
                      ": a logit was NaN or +infinity, or all were -infinity");
  return tokens;
}

std::vector<float> CudaLlama::download_logits(cudaStream_t stream) const {
  std::vector<float> numbers(logit_rows_ * config_.vocabulary);
  if (numbers.empty()) return numbers;
  check(cudaMemcpyAsync(numbers.data(), logits(), numbers.size() * sizeof(float), cudaMemcpyDeviceToHost,
                        stream),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  return numbers;
}

std::vector<float> CudaLlama::forward(std::span<const int> tokens, std::size_t first_position,
                                      const DeviceAttendFn& attend, LogitsOf logits, cudaStream_t stream) {
  reserve(tokens.size(), logits == LogitsOf::all ? tokens.size() : 1, stream);
  set_tokens(tokens, first_position, stream);
  forward(tokens.size(), attend, logits, stream);
  return download_logits(stream);
}

}  // namespace kvpolicy::reference
